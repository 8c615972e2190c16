"""Measurements that a user can repeat on his own machine. Numbers come with what they were measured on."""
