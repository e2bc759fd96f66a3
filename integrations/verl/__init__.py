"""verl: estimators, losses and trainers by name. Importing this package registers them; see `docs/verl.md`."""
