"""Starts the code interpreter; see server.py."""

import server

server.main()
