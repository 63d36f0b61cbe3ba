package notify

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/internal/mail"
)

// linkPath is the path of links; the token follows.
const linkPath = "/look/"

// link returns the address of the page that shows p's action.
func (n *Notifier) link(p outgoing) string { return n.conf.Base + linkPath + p.token.Reveal() }

// mailText returns the subject and the text of the mail for p. The only parts
// that an agent chose are those that [actionFields] defangs. The mail is plain
// text, so that no program follows markup in it.
func (n *Notifier) mailText(p outgoing) (subject, text string) {
	var b strings.Builder
	b.WriteString(headline(p) + ".\n\n")
	if p.others > 0 {
		fmt.Fprintf(&b, "%s\n%s/console/review\n", n.together(), n.conf.Base)
		return "Postern: " + headline(p), b.String()
	}
	for _, f := range actionFields(p.action) {
		fmt.Fprintf(&b, "  %-14s %s\n", f.name, f.value)
	}
	fmt.Fprintf(&b, `
View it:
%s

Anybody with this link can see the action for as long as it waits, so do not
forward it. The page decides nothing: sign in there to decide.
`, n.link(p))
	if p.last {
		fmt.Fprintf(&b, "\nThis is notice %d within an hour. Further ones are combined into one message when the hour is over.\n", n.conf.PerHour)
	}
	return "Postern: " + headline(p) + " (" + prefix(p.action)[:8] + ")", b.String()
}

// together says why several actions are in one message.
func (n *Notifier) together() string {
	return fmt.Sprintf("They are told together: they came in quiet hours, within the time that you collect, or after %d notices within an hour.", n.conf.PerHour)
}

func (n *Notifier) sendMail(ctx context.Context, p outgoing) result {
	subject, text := n.mailText(p)
	return n.sendMailTo(ctx, p.to, subject, text)
}

// errServed means that an address is one of this server's own.
var errServed = errors.New("the address is in a domain of this server, so an agent could read the notice: use an address elsewhere")

// sendMailTo sends one mail to a person.
func (n *Notifier) sendMailTo(ctx context.Context, to person, subject, text string) result {
	addr, err := mail.ParseAddress("address of "+to.ID, to.email)
	if err != nil {
		return result{state: "failed", err: err}
	}
	if n.conf.Serves != nil {
		// The attack: an agent's own address is set as a person's, so that the agent can
		// follow the link and read what others propose.
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
		return result{state: "failed", err: fmt.Errorf("the transport reported %d recipients, want 1", len(ds))}
	}
	said := errors.New(mail.Printable(ds[0].Detail, 200))
	switch ds[0].Outcome {
	case mail.Accepted:
		return result{state: "sent"}
	case mail.Uncertain: // it may have arrived: do not send it twice
		return result{state: "sent", err: said}
	case mail.Refused:
		return result{state: "failed", err: said}
	case mail.NotSent:
	}
	return result{state: "waiting", err: said}
}
