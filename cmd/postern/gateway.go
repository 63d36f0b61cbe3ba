package main

// gatewayCommand runs the server under the name that users of email-sandbox know.
func gatewayCommand() *command {
	start := upCommand()
	start.use = "start"
	start.short = `run the server; the same as "postern up"`
	start.long = `
The same as "postern up", under the name that email-sandbox has for it, with all
of its settings. A program or an agent that was written for email-sandbox is
connected by two variables:

  export EMAIL_SANDBOX_API_URL=http://127.0.0.1:3000/email-sandbox
  export EMAIL_SANDBOX_API_KEY=pib_...     # of: postern inbox create analyst

Its 13 tools have the same names, arguments and statuses here: over HTTP at
/email-sandbox/api/tools, over the Model Context Protocol at /mcp, and through
"postern mcp", which reads the same variables. What leaves is decided with
"postern pending" and "postern approve", or in the console.`
	return &command{
		use:   "gateway",
		short: "the server, under email-sandbox's name for it",
		below: []*command{start},
	}
}
