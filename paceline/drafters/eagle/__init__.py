"""The EAGLE-3 drafter: a small head that reads the target's hidden states and drafts from them."""

from paceline.drafters.eagle.drafter import EagleDrafter as EagleDrafter
from paceline.drafters.eagle.drafter import recipe as recipe
from paceline.drafters.eagle.drafter import recipe_of as recipe_of
