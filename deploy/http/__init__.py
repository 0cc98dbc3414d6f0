"""The HTTP service: routes, admission, and answers over one app's session. Runs in any ASGI server; Serve is one."""
