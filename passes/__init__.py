"""The compiler: from Dynamo's graph to each rank's local program."""
