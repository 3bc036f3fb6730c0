"""Frozen descriptions that every floor above shares: layout, schedule table, model shape, parallel plan, plan. No torch."""
