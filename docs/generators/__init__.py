"""Programs that make the reference pages of the site, and the arithmetic of deploy/SIZING.md."""
