package notify

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/mail"
)

// linkPath is where links lead to; the token follows.
const linkPath = "/look/"

// link returns the address of the page that shows p's action.
func (n *Notifier) link(p outgoing) string { return n.conf.Base + linkPath + p.token.Reveal() }

// mailText returns subject and text of the mail for p. All of it is ours but what
// [actionFields] makes inert; it is plain text, so that nothing in it is obeyed.
func (n *Notifier) mailText(p outgoing) (subject, text string) {
	var b strings.Builder
	b.WriteString(headline(p) + ".\n\n")
	if p.others > 0 {
		fmt.Fprintf(&b, "You were told of %d in an hour and these came on top, so they are told together:\n%s/console/\n", n.conf.PerHour, n.conf.Base)
		return "Postern: " + headline(p), b.String()
	}
	for _, f := range actionFields(p.action) {
		fmt.Fprintf(&b, "  %-14s %s\n", f.name, f.value)
	}
	fmt.Fprintf(&b, `
Look at it:
%s

The page shows it, to whoever has this link, for as long as it waits: pass the
link on to nobody. It decides nothing. To decide, sign in from there.
`, n.link(p))
	if p.last {
		fmt.Fprintf(&b, "\nThis is number %d within an hour. What else comes in that hour is told together at its end.\n", n.conf.PerHour)
	}
	return "Postern: " + headline(p) + " (" + prefix(p.action)[:8] + ")", b.String()
}

func (n *Notifier) sendMail(ctx context.Context, p outgoing) result {
	subject, text := n.mailText(p)
	return n.sendMailTo(ctx, p.to, subject, text)
}

// errServed means that an address is one of this server's own.
var errServed = errors.New("the address is of a domain whose mail stays here: an agent would read what is asked about agents")

// sendMailTo sends one mail to a person.
func (n *Notifier) sendMailTo(ctx context.Context, to person, subject, text string) result {
	addr, err := mail.ParseAddress("address of "+to.ID, to.email)
	if err != nil {
		return result{state: "failed", err: err}
	}
	if n.conf.Serves != nil {
		// The attack: an agent whose own address is set as a person's reads what
		// others propose, by the link.
		switch own, err := n.conf.Serves(ctx, mail.Domain(addr.Addr)); {
		case err != nil:
			return result{state: "waiting", err: err}
		case own:
			return result{state: "failed", err: errServed}
		}
	}
	domain := mail.Domain(n.from.Addr)
	env, err := mail.Compose(mail.Draft{From: n.conf.From, To: []string{addr.Addr}, Subject: subject, Text: text}, time.Now(), domain)
	if err != nil {
		return result{state: "failed", err: err}
	}
	if n.conf.Sign != nil {
		if env.Prefix, err = n.conf.Sign(ctx, domain, env.Raw); err != nil {
			return result{state: "waiting", err: fmt.Errorf("sign notice: %w", err)}
		}
	}
	ds, err := n.conf.Transport.Deliver(ctx, env)
	if err != nil {
		return result{state: "failed", err: err}
	}
	if len(ds) != 1 {
		return result{state: "failed", err: fmt.Errorf("the transport told of %d recipients of 1", len(ds))}
	}
	said := errors.New(mail.Printable(ds[0].Detail, 200))
	switch ds[0].Outcome {
	case mail.Accepted:
		return result{state: "sent"}
	case mail.Uncertain: // it may be there: never twice
		return result{state: "sent", err: said}
	case mail.Refused:
		return result{state: "failed", err: said}
	case mail.NotSent:
	}
	return result{state: "waiting", err: said}
}
