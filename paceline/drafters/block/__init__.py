"""Block drafters: a few layers over the target's hidden states that draft a whole block of tokens in one pass."""

from paceline.drafters.block.drafter import BlockDrafter as BlockDrafter
from paceline.drafters.block.drafter import recipe as recipe
