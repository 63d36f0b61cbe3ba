package policy

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Kind is a kind of action: an effect on the outside world, or on what an
// agent may do. Its zero value is not valid.
type Kind string

// The kinds of action. To add one, add its constant here and its row to kindRows;
// its executor is a package of its own, which [postern/internal/oversight.Gate]
// is given in cmd. Pages, notices, kill switches and the language of policies
// take it from the row.
const (
	KindSend    Kind = "email.send"
	KindReceive Kind = "email.receive"
	KindArchive Kind = "email.archive"
	KindTrash   Kind = "email.trash"
	KindCopy    Kind = "email.copy"
	KindMode    Kind = "inbox.mode"
	KindAllow   Kind = "inbox.allow"
	KindChange  Kind = "policy.change"
	KindConnect Kind = "net.connect"
	KindWebhook Kind = "webhook.create"
	KindRequest Kind = "net.request"
	KindSecret  Kind = "secret.use"
	KindPermit  Kind = "net.permit"
	KindTool    Kind = "mcp.call"
	KindRun     Kind = "run.start"
	KindExport  Kind = "file.export"
	KindExec    Kind = "process.exec"
)

// A kindRow describes a kind of action. Pages, notices and the policy language
// read it, so that a new kind needs no change there.
type kindRow struct {
	kind    Kind
	means   string // what would happen, for the documentation
	title   string // on pages
	subject string // begins the sentence of a notice
	// detail are the keys of [Request.Detail], the attributes that only this kind has.
	detail []string
	// within is how long an action of this kind waits for a decision before it is
	// denied, if no rule sets a time; 0 means the gate's default.
	within time.Duration
	// personal names the change in a verdict, if only a person may decide on it. It
	// is empty if rules may decide. The attack: a careless or planted rule lets an
	// agent loosen its own mode or the policy that judges it.
	personal string
	// undeniable means that no rule may deny it: a rule that denies changes of the
	// policy could never be removed.
	undeniable bool
	// unstoppable means that no kill switch is offered for it.
	unstoppable bool
	// byMode returns the verdict if no rule matches; nil means that a person is asked.
	byMode func(r Request) Verdict
}

// kindRows has a row for every kind, in the order in which pages list them.
var kindRows = []kindRow{
	{
		kind: KindSend, means: "an agent sends mail", title: "Email", subject: "An email",
		byMode: sendByMode,
	},
	{
		kind: KindReceive, means: "mail arrives for an inbox", title: "Email that arrived", subject: "An email that arrived",
		detail: []string{"score"},
		byMode: receiveByMode,
	},
	{
		kind: KindTrash, means: "an agent moves a message to the trash", title: "Message to trash", subject: "A request to trash a message",
		detail: []string{"message"},
		byMode: trashByMode,
	},
	{
		kind: KindArchive, means: "an agent moves a message to the archive", title: "Message to archive", subject: "A request to archive a message",
		detail: []string{"message"},
		byMode: archiveByMode,
	},
	{
		kind: KindConnect, means: "code in a sandbox connects to the outside", title: "Connection", subject: "A connection out of a sandbox",
		detail: []string{"host", "port"}, within: time.Hour, // code that waits for its connection does not wait for days
	},
	{
		kind: KindRequest, means: "code in a sandbox makes an HTTP request", title: "Request", subject: "A request out of a sandbox",
		detail: []string{"url"}, within: time.Hour,
		byMode: requestByMode,
	},
	{
		kind: KindSecret, means: "the wall puts a secret on a request of a sandbox", title: "Use of a secret", subject: "A use of a secret",
		detail: []string{"secret"}, within: time.Hour,
		byMode: secretBySetting,
	},
	{
		kind: KindTool, means: "a tool of a sandbox's MCP servers is called, or code in a sandbox calls one elsewhere", title: "Tool call", subject: "A call of a tool",
		detail: []string{"server", "tool"}, within: time.Hour,
		byMode: toolByMode,
	},
	{
		kind: KindRun, means: "a run is proposed: a contract, a task and inputs", title: "Run", subject: "A run",
		detail: []string{"contract", "digest", "template", "approved"},
		byMode: runByApproval,
	},
	{
		kind: KindExport, means: "a file of a run is released", title: "File", subject: "A file of a run",
		detail: []string{"run", "contract", "name", "type", "size", "review"},
		byMode: exportByReview,
	},
	{
		kind: KindExec, means: "a program is started in a sandbox", title: "Command", subject: "A command in a sandbox",
		detail: []string{"program", "command", "contract"}, within: time.Hour,
		byMode: execByMode,
	},
	{
		kind: KindPermit, means: "an agent proposes that its sandbox may make certain requests", title: "Network permit", subject: "A network permit for a sandbox",
		detail: []string{"hosts", "methods", "until", "scope"}, personal: "a network permit",
	},
	{
		kind: KindWebhook, means: "an agent registers a URL that receives events", title: "Webhook", subject: "A webhook of an agent",
		detail: []string{"url", "host"},
	},
	{
		kind: KindMode, means: "an inbox changes to a mode with less oversight", title: "Change of mode", subject: "A change of an inbox's mode",
		detail: []string{"from", "to"}, personal: "a mode with less oversight",
	},
	{
		kind: KindAllow, means: "an inbox's allow list gets an entry", title: "Addition to an allow list", subject: "An addition to an allow list",
		detail: []string{"pattern", "until"}, personal: "an addition to an allow list",
	},
	{
		kind: KindChange, means: "the policy is replaced", title: "Change of policy", subject: "A change of the policy",
		detail: []string{"version", "proposer"}, personal: "a change of the policy", undeniable: true,
	},
	{
		kind: KindCopy, means: "overseers get a copy of what a monitored inbox sends", title: "Copy for overseers", subject: "A copy for overseers",
		detail: []string{"of"}, unstoppable: true, byMode: copyByMode,
	},
}

// row returns the row of k, or a row with nothing but the name if k is unknown.
func (k Kind) row() kindRow {
	if i := slices.IndexFunc(kindRows, func(r kindRow) bool { return r.kind == k }); i >= 0 {
		return kindRows[i]
	}
	return kindRow{kind: k}
}

// Kinds returns every kind, in the order in which pages list them.
func Kinds() []Kind {
	out := make([]Kind, len(kindRows))
	for i, r := range kindRows {
		out[i] = r.kind
	}
	return out
}

// JoinKinds returns kinds as a list for people: "email.send, net.connect".
func JoinKinds(kinds []Kind) string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = string(k)
	}
	return strings.Join(names, ", ")
}

// Stoppable returns the kinds for which people are offered a kill switch, in
// the order in which pages list them.
func Stoppable() []Kind {
	return slices.DeleteFunc(Kinds(), func(k Kind) bool { return k.row().unstoppable })
}

// Known reports whether k is one of the kinds.
func (k Kind) Known() bool { return k.row().title != "" }

// Title returns the name of k for pages, such as "Email". An unknown kind is
// returned as it is.
func (k Kind) Title() string {
	if t := k.row().title; t != "" {
		return t
	}
	return string(k)
}

// Subject returns the subject of a notice's first sentence, such as "An email",
// or an empty string if k is unknown.
func (k Kind) Subject() string { return k.row().subject }

// Means describes the effect of an action of kind k: "an agent sends mail".
func (k Kind) Means() string { return k.row().means }

// Detail returns the keys of [Request.Detail] that requests of kind k have.
func (k Kind) Detail() []string { return slices.Clone(k.row().detail) }

// Personal reports whether only a person decides on actions of kind k, whatever
// a rule says. All of these change what agents may do.
func (k Kind) Personal() bool { return k.row().personal != "" }

// askedIn returns the verdict of a mode that asks a person.
func askedIn(mode Mode, why string) Verdict {
	return Verdict{Effect: Ask, Rule: string(mode), Reason: fmt.Sprintf("the inbox is in mode %s: %s", mode, why)}
}

// allowedIn returns the verdict of a mode that needs no approval.
func allowedIn(mode Mode, why string) Verdict {
	return Verdict{Effect: Allow, Rule: string(mode), Reason: fmt.Sprintf("the inbox is in mode %s: %s", mode, why)}
}

func sendByMode(r Request) Verdict {
	switch r.Mode {
	case Monitored, Autonomous:
		return allowedIn(r.Mode, "sending needs no approval")
	case GatedAll:
		return askedIn(GatedAll, "every send needs approval")
	case GatedSend:
		if r.Listed && len(r.To) > 0 { // a send without recipients is vacuously listed
			return Verdict{Effect: Allow, Rule: string(GatedSend), Reason: "every recipient is on the inbox's allow list"}
		}
	case ReadOnly: // denied before any rule is tried
	}
	return askedIn(GatedSend, "every send needs approval")
}

func receiveByMode(r Request) Verdict {
	if r.Mode.Known() && r.Mode != GatedAll {
		return allowedIn(r.Mode, "incoming mail needs no approval")
	}
	return askedIn(GatedAll, "incoming mail needs approval")
}

func archiveByMode(r Request) Verdict {
	if r.Mode.Known() && r.Mode != GatedAll {
		return Verdict{Effect: Allow, Rule: string(r.Mode), Reason: "archived mail is not lost, and nothing leaves"}
	}
	return askedIn(GatedAll, "archiving needs approval")
}

func trashByMode(r Request) Verdict {
	if r.Mode == Monitored || r.Mode == Autonomous {
		return allowedIn(r.Mode, "moving to the trash needs no approval")
	}
	return askedIn(r.Mode, "moving to the trash needs approval")
}

// requestByMode allows: the lists of the sandbox and the rules about connections
// have let it connect to the host.
func requestByMode(Request) Verdict {
	return Verdict{Effect: Allow, Reason: "no rule is about this request, and its sandbox may connect to the host"}
}

// toolByMode allows: a sandbox's creator has chosen its servers, what they do outside is
// judged again at the wall, and a host that is called elsewhere is one to which the
// sandbox may connect.
func toolByMode(Request) Verdict {
	return Verdict{Effect: Allow, Reason: "no rule is about this call"}
}

// secretBySetting asks: where a secret's own setting allows its use, policy is not
// asked.
func secretBySetting(r Request) Verdict {
	if r.Detail["first"] == "true" {
		return Verdict{Effect: Ask, Reason: "the secret's setting asks a person at its first use by a sandbox"}
	}
	return Verdict{Effect: Ask, Reason: "the secret's setting asks a person about each request"}
}

// execByMode allows every command unless a contract requires a person's decision. A sandbox
// exists to run programs, and the wall controls their connections.
func execByMode(r Request) Verdict {
	if r.Detail["contract"] != "" {
		return Verdict{Effect: Ask, Reason: "the contract requires a person's decision about this command"}
	}
	return Verdict{Effect: Allow, Reason: "no rule applies to this command"}
}

// runByApproval allows a run that asks for nothing beyond a run that a person approved
// recently, so that a retry with less needs no new review. Only the server sets the detail
// "approved", which names the action of that run.
func runByApproval(r Request) Verdict {
	if a := r.Detail["approved"]; a != "" {
		return Verdict{Effect: Allow, Reason: "it asks for nothing beyond what a person has approved in " + a}
	}
	return Verdict{Effect: Ask, Reason: "a person reviews each run before it starts"}
}

// exportByReview decides as the run's contract says. A file that the scan flags always needs
// a person.
func exportByReview(r Request) Verdict {
	if r.Detail["review"] == "flagged" && len(r.Flags) == 0 {
		return Verdict{Effect: Allow, Reason: "the contract releases this file if the scan finds nothing, and it found nothing"}
	}
	return Verdict{Effect: Ask, Reason: "a person reviews each file before it is released"}
}

// copyByMode always allows. The daemon makes the copy itself, of mail that was
// already judged; holding it would only hide the mail from its overseers.
func copyByMode(Request) Verdict {
	return Verdict{Effect: Allow, Rule: string(Monitored), Reason: "its overseers get a copy"}
}
