"""The rows of files of any form as entries: `forms.open_rows` opens a file. Memory: some blocks. One thread a file."""
