"""Where entries come from: what follows other systems' logs, and reads their messages again."""
