"""The suffix drafter: tokens that followed the last ones before, in this text, in past answers and in given files."""

from paceline.drafters.suffix.drafter import SuffixDrafter as SuffixDrafter
from paceline.drafters.suffix.drafter import recipe as recipe
