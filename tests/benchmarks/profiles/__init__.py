"""Where the time of each main operation goes, beside what nothing can be faster than."""
