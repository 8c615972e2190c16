"""The portfolio: several drafters on one request, of which each round takes what pays."""

from paceline.drafters.portfolio.drafter import PortfolioDrafter as PortfolioDrafter
from paceline.drafters.portfolio.drafter import recipe as recipe
