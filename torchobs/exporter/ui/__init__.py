"""The live page: a web page that shows a run, rendered on the server and updated by server-sent events."""
