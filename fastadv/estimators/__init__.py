"""Advantage estimators under the names of the frameworks that own them: docs/estimators.md."""
