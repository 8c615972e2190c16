"""Early layers: the target's own first layers draft, on its weights and KV memory (LayerSkip, Elhoushi et al. 2024)."""

from paceline.drafters.layers.drafter import NAME as NAME
from paceline.drafters.layers.drafter import recipe as recipe
