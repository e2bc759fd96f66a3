"""Arms of the plan as flags and YAML for Miles and slime."""
