"""Code that tests of several folders share: small indexes, histories of merges, servers, limits."""
