package console

import (
	"fmt"
	"html/template"

	"postern/internal/connector"
	"postern/internal/domain"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/webhook"
)

// toneIcons are the symbols of the tones of a tag. People who cannot tell the colours apart
// see the symbol, and people who see neither read the text.
var toneIcons = map[string]string{"good": "check", "warn": "warn", "bad": "x"}

// tag returns a short text with a tone: good, warn, bad, accent, or none. The symbol and
// the text say what the colour says.
func tag(tone string, text any) template.HTML {
	s := ""
	if name := toneIcons[tone]; name != "" {
		s = string(icon(name))
	}
	//nolint:gosec // the tone is ours and escaped, as is the text, which may be hostile
	return template.HTML(`<span class="tag ` + template.HTMLEscapeString(tone) + `">` + s + template.HTMLEscapeString(line(text)) + `</span>`)
}

// tone returns the tone of a state: good, bad, warn (look closer) or accent (under way). An
// unknown state has no tone, so that no state looks better than it is.
func tone(state any) string {
	switch s := state.(type) {
	case oversight.State:
		switch s {
		case oversight.Done:
			return "good"
		case oversight.Denied, oversight.Failed:
			return "bad"
		case oversight.Unknown, oversight.Pending:
			return "warn"
		case oversight.Approved, oversight.Executing, oversight.Scheduled:
			return "accent"
		case oversight.Cancelled:
		}
	case oversight.PartState:
		switch s {
		case oversight.PartDelivered:
			return "good"
		case oversight.PartBounced, oversight.PartSuppressed:
			return "bad"
		case oversight.PartUncertain, oversight.PartDeferred:
			return "warn"
		case oversight.PartQueued, oversight.PartSending:
			return "accent"
		case oversight.PartCancelled:
		}
	case sandbox.State:
		switch s {
		case sandbox.Running:
			return "good"
		case sandbox.Failed, sandbox.Lost:
			return "bad"
		case sandbox.Creating, sandbox.Pausing, sandbox.Paused, sandbox.Resuming:
			return "accent"
		case sandbox.Killed:
		}
	default:
		return settingTone(state)
	}
	return ""
}

// settingTone is tone for the states of what people set up.
func settingTone(state any) string {
	switch state {
	case domain.StateVerified, domain.OK, connector.Connected, webhook.Delivered, "kept":
		return "good"
	case domain.StateLost, domain.Missing, domain.Wrong, connector.SignIn, webhook.Failed, "violated":
		return "bad"
	case domain.StateDegraded, domain.Warning, domain.Unreachable, "not_verified":
		return "warn"
	case domain.StatePending, connector.Syncing, connector.Paused, webhook.Waiting:
		return "accent"
	}
	return ""
}

// line makes invisible characters visible and returns one line.
func line(s any) string { return mail.Printable(fmt.Sprint(s), 4096) }

// exit returns a tag for the exit code of a command: 0 is good, all others are bad. Without
// a code, the command has not ended or was not started.
func exit(code *int) template.HTML {
	switch {
	case code == nil:
		return "–"
	case *code == 0:
		return tag("good", 0)
	}
	return tag("bad", *code)
}
