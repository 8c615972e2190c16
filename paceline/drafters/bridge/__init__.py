"""A draft model with another vocabulary than the target's, over a bridge between both (`paceline.text.bridge`).

`context` has a sequence's text in the drafter's tokens, `logits` what the drafter says in the target's, and `drafter`
the drafter itself.
"""

from paceline.drafters.bridge.drafter import BridgedDrafter as BridgedDrafter
