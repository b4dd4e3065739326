"""Speed, start-up and memory of an engine, with the machine's own limits and a baseline measured in the same run."""
