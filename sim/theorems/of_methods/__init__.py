"""The theorems on the methods: a file for each method, several where it has many."""
