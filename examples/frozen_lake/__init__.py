"""A policy that is trained on FrozenLake through fastadv, and its logged rollouts."""
