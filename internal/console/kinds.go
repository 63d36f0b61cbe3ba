package console

import (
	"cmp"
	"fmt"
	"strings"

	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A kindLook is how the pages for reviewers present a kind of action.
type kindLook struct {
	Icon   string
	Name   string // on the page of one
	Plural string // on the chip that selects the kind
	Lead   string // before its target, for people who use a screen reader
	Wants  string // what the agent wants, after its name
	Button string // what the button does
}

// kindLooks returns how actions of kind k are presented.
func kindLooks(k policy.Kind) kindLook {
	switch k {
	case policy.KindSend:
		return kindLook{"mail", "Mail", "Mail", "Mail to", "wants to send this mail", "Approve and send"}
	case policy.KindReceive:
		return kindLook{"mail", "Arrived mail", "Arrived", "Mail for", "has mail that is held", "Approve and deliver to the inbox"}
	case policy.KindArchive:
		return kindLook{"mail", "Message to archive", "Archive", "Archive for", "wants to archive a message", "Approve and archive"}
	case policy.KindTrash:
		return kindLook{"mail", "Message to trash", "Trash", "Trash for", "wants to move a message to the trash", "Approve and move to the trash"}
	case policy.KindCopy:
		return kindLook{"mail", "Copy for overseers", "Copies", "Copy for", "sent mail of which overseers get a copy", "Approve the copy"}
	case policy.KindRequest:
		return kindLook{"request", "HTTP request", "Requests", "Request to", "wants to make this request", "Approve and make this request"}
	case policy.KindSecret:
		return kindLook{"key", "Use of a secret", "Secrets", "Use of a secret at", "wants to use a secret", "Approve and make this request"}
	case policy.KindConnect:
		return kindLook{"globe", "Connection", "Connections", "Connection to", "wants to open this connection", "Approve the connection"}
	case policy.KindPermit:
		return kindLook{"globe", "Network permit", "Permits", "Permit for", "asks for a network permit", "Approve the permit"}
	case policy.KindTool:
		return kindLook{"run", "MCP call", "MCP calls", "Call of", "wants to call this tool", "Approve the call"}
	case policy.KindRun:
		return kindLook{"run", "Run", "Runs", "Run", "wants to start this run", "Approve and start the run"}
	case policy.KindExport:
		return kindLook{"file", "File", "Files", "File", "wants to release this file", "Approve and release the file"}
	case policy.KindExec:
		return kindLook{"term", "Command", "Commands", "Command", "wants to start this program", "Approve and start it"}
	case policy.KindWebhook:
		return kindLook{"globe", "Webhook", "Webhooks", "Webhook to", "wants its events sent to a URL", "Approve the webhook"}
	case policy.KindMode:
		return kindLook{"switch", "Change of mode", "Modes", "Mode of", "asks for a mode with less oversight", "Approve the mode"}
	case policy.KindAllow:
		return kindLook{"policy", "Allow list", "Allow list", "Allow list of", "asks to write somebody without approval", "Approve the entry"}
	case policy.KindChange:
		return kindLook{"policy", "Change of policy", "Policy", "Change of", "asks for another policy", "Approve the policy"}
	}
	return kindLook{"list", k.Title(), k.Title(), k.Title(), "asks for this", "Approve"}
}

// target returns the target of an action in a few words: the recipient, the host, the
// program. It reads only the request to the policy, so that a list needs no contents.
func target(a *oversight.Action) string {
	d := a.Request.Detail
	switch a.Kind {
	case policy.KindRequest, policy.KindSecret:
		if a.Request.HTTP != nil {
			return a.Request.HTTP.Host
		}
	case policy.KindConnect:
		if d["port"] == "" {
			return d["host"]
		}
		return d["host"] + ":" + d["port"]
	case policy.KindExec:
		return d["program"]
	case policy.KindExport:
		return d["name"]
	case policy.KindRun:
		return d["contract"]
	case policy.KindTool:
		return strings.Trim(d["server"]+" "+d["tool"], " ")
	case policy.KindPermit:
		return d["hosts"]
	case policy.KindWebhook:
		return cmp.Or(d["host"], d["url"])
	case policy.KindChange:
		return "the policy"
	case policy.KindAllow:
		return d["pattern"]
	case policy.KindSend, policy.KindReceive, policy.KindArchive, policy.KindTrash, policy.KindCopy, policy.KindMode:
	}
	if len(a.Request.To) > 0 {
		return a.Request.To[0]
	}
	return cmp.Or(a.Request.Inbox, a.Kind.Title())
}

// leftAs completes "nothing has …" for an action that waits.
func leftAs(k policy.Kind) string {
	switch k {
	case policy.KindRun, policy.KindExec:
		return "started"
	case policy.KindMode, policy.KindAllow, policy.KindChange, policy.KindPermit, policy.KindWebhook, policy.KindReceive, policy.KindArchive, policy.KindTrash:
		return "changed"
	case policy.KindSend, policy.KindCopy, policy.KindRequest, policy.KindSecret, policy.KindConnect, policy.KindTool, policy.KindExport:
	}
	return "left"
}

// says is the sentence above the buttons: what happens if the viewer approves.
type says struct{ Before, Exactly, After string }

// says returns what an approval does.
func (r *review) says(missing int) says {
	if missing > 1 {
		return says{Before: "Counts ", Exactly: "your approval", After: fmt.Sprintf(" as one of %d. Nothing leaves before the others approve.", r.Approvers)}
	}
	switch r.Kind {
	case policy.KindSend:
		return r.sends()
	case policy.KindRequest, policy.KindSecret:
		if q := r.View.Request; q != nil {
			with := ""
			if len(q.Secrets) > 0 {
				with = " with " + strings.Join(q.Secrets, " and ")
			}
			if q.Grant > 0 {
				return says{"Makes ", "this request", with + fmt.Sprintf(", and lets the sandbox use %s for %s. The answers go to the sandbox only.", q.GrantOf, wholeTime(q.Grant))}
			}
			return says{"Makes ", "this one request", with + ", once. The answer goes to the sandbox only."}
		}
	case policy.KindConnect:
		return says{"Lets the sandbox connect to ", target(&r.Action), " for " + wholeTime(oversight.PassTime) + ", and send and read anything there."}
	case policy.KindExec:
		return says{"Starts ", "this program with these arguments", ", once, within an hour. What it connects to is judged on its own."}
	case policy.KindExport:
		return says{"Releases ", "this file, " + short(r.Request.Size), ", byte by byte. It cannot be called back."}
	case policy.KindMode:
		return says{"Changes ", "the mode of the inbox", " at once. An owner can change it back at any time."}
	case policy.KindAllow:
		return says{"Lets the inbox write to ", target(&r.Action), " without approval from now on. An owner can remove the entry at any time."}
	case policy.KindRun:
		return says{"Starts ", "this run", ", once, within what the contract allows."}
	case policy.KindTool:
		return says{"Makes ", "this one call", ", once. The answer goes to the sandbox only."}
	case policy.KindReceive:
		return says{"Delivers ", "this message", " to the inbox, where its agent reads it."}
	case policy.KindPermit:
		return says{"Lets the sandbox make ", "requests as described", " without asking. You can end the permit at any time."}
	case policy.KindWebhook:
		return says{"Sends ", "events of the inbox", " to this URL from now on. It can be removed at any time."}
	case policy.KindChange:
		return says{"Puts ", "this policy", " in force at once, for every agent of the project."}
	case policy.KindArchive, policy.KindTrash, policy.KindCopy:
	}
	return says{"Carries out ", "exactly this", ", once."}
}

// sends returns the sentence for mail.
func (r *review) sends() says {
	s := says{Before: "Sends ", Exactly: "these exact " + kilobytes(int64(len(r.Payload))), After: " to " + count(r.Count(), "address", "addresses")}
	if n := len(r.Hidden); n > 0 {
		s.After += fmt.Sprintf(", %d of them hidden", n)
	}
	switch {
	case !r.SendAt.IsZero():
		s.After += ", not before " + r.SendAt.UTC().Format("2 Jan 15:04 UTC") + ". You can cancel it until then."
	case r.Undo > 0:
		s.After += ", " + span(r.Undo) + " after you approve. You can cancel it until then, and not afterwards."
	default:
		s.After += ", at once. It cannot be called back."
	}
	return s
}

// kilobytes writes a number of bytes for the sentence above the buttons.
func kilobytes(n int64) string {
	switch {
	case n < 1000:
		return count(int(n), "byte", "bytes")
	case n < 1000*1000:
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}

// approveLabel returns the label of the button.
func (r *review) approveLabel(missing int) string {
	if missing > 1 {
		return fmt.Sprintf("Approve as one of %d", r.Approvers)
	}
	label := kindLooks(r.Kind).Button
	if q := r.View.Request; q != nil && q.Grant > 0 {
		return "Approve the use of " + q.GrantOf
	}
	if n := r.Count(); r.Kind == mailbox.SendKind && n > 0 {
		label += fmt.Sprintf(" to %d", n)
		if h := len(r.Hidden); h > 0 {
			label += fmt.Sprintf(", %d hidden", h)
		}
	}
	return label
}

// Partly returns how many files the page does not show in full.
func (p actionPage) Partly() (n int) {
	for _, f := range p.Attached {
		if !f.Looked || !f.Preview.Whole() {
			n++
		}
	}
	return n
}
