"""Where the time of each main operation goes, before and after, beside what nothing can be faster than."""
