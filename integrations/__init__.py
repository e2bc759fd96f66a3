"""Drop-ins for trainers. Nothing of a framework is imported before its hook is called."""
