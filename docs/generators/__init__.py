"""Programs that put measured tables into the pages of docs/, README.md and deploy/SIZING.md."""
