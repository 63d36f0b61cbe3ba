package main

const mailboxHelp = `
A mailbox that exists already, at another provider, becomes an inbox: agents read
it, and what they send waits for a person and then leaves through the provider.
See docs/tasks/connect-gmail.md.` + personalHelp

func mailboxCommand() *command {
	var c Config
	return &command{
		use: "mailbox", short: "connect mailboxes that exist already", long: mailboxHelp,
		flags: c.location,
		below: []*command{{
			use: "connect", short: "connect a mailbox at another provider",
			below: []*command{gmailCommand(&c)},
		}},
	}
}
