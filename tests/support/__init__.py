"""What tests of several folders use: indexes to ask, lives of merging and staging, servers, limits."""
