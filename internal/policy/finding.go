package policy

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A Finding is something that a reviewer should look at closely before the decision.
// Subject, Title and Text may hold text of an agent.
type Finding struct {
	ID      string `json:"id"`   // kind and subject, "lookalike:globex.co": stable for one content of an action
	Kind    string `json:"kind"` // one of FindingKinds
	Subject string `json:"subject,omitempty"`
	Title   string `json:"title"`
	Text    string `json:"text,omitempty"`
	Grave   bool   `json:"grave,omitempty"` // an approval without its own tick does not count; fixed when the action was judged
}

// The kinds of findings that are made for the reviewer. The names of content flags are
// kinds of findings too.
const (
	FindLookalike = "lookalike"        // a recipient or a host whose name looks like a known one
	FindHidden    = "hidden_recipient" // a Bcc outside
	FindAccount   = "second_account"   // a bank account that differs from the others, or from earlier ones
	FindSecret    = "secret"           // what the search for secrets found
	FindMachine   = "machine"          // a recipient that is a program
	FindAnswers   = "many_answers"     // two programs may be answering each other
	FindMore      = "more_findings"    // there are more findings than can be listed; grave wherever any kind is
)

// A findingKind is a kind of finding and what it means.
type findingKind struct{ name, means string }

// findingKinds are the kinds that a document may call grave. The names of content flags
// come from packages leak and scan; mailbox's TestFlagsAreKindsOfFindings compares them.
var findingKinds = []findingKind{
	{FindLookalike, "a recipient or a host whose name looks like one that the project knows"},
	{FindHidden, "a recipient in Bcc who is neither at one of the project's own domains nor an inbox of the project"},
	{FindAccount, "a bank account that differs from the others in the mail, or from those of earlier mails"},
	{FindSecret, "a key, a token, a password or a file that holds some"},
	{FindMachine, "an answer to a message that a program made, or mail to an address that nobody reads"},
	{FindAnswers, "more automatic answers between two addresses within an hour than may leave without a person"},
	{"private_key", "a private key"},
	{"payment_card", "the number of a payment card"},
	{"iban", "a bank account number"},
	{"national_id", "a number by which a state identifies a person"},
	{"personal_data", "addresses or telephone numbers of many people"},
	{"environment", "a dump of a process's environment variables"},
	{"hidden_text", "text that a person does not see"},
	{"unseen_characters", "characters without width, or that reverse the text"},
	{"tracking", "pictures that report who opens the mail"},
	{"remote_content", "other remote pictures and styles"},
	{"link_mismatch", "a link that shows one host and leads to another"},
	{"unread", "content that could not be read"},
	{"media", "pictures, sound and films, whose content is not read"},
	{"instruction_override", "arriving mail that gives a model other instructions"},
	{"role_impersonation", "arriving mail that passes for a system, a developer or the model"},
	{"exfiltration", "arriving mail that has secrets or mail sent somewhere"},
	{"tool_abuse", "arriving mail that has tools or commands used"},
	{"obfuscation", "arriving mail that is written so that filters do not read it"},
	{"phishing_link", "arriving mail with a link that leads elsewhere than it seems"},
}

// FindingKinds returns the kinds of findings that a document may call grave.
func FindingKinds() []string {
	out := make([]string, len(findingKinds))
	for i, k := range findingKinds {
		out[i] = k.name
	}
	return out
}

// FindingMeans describes a kind of finding for people. It is empty if kind is unknown.
func FindingMeans(kind string) string {
	if i := slices.IndexFunc(findingKinds, func(k findingKind) bool { return k.name == kind }); i >= 0 {
		return findingKinds[i].means
	}
	return ""
}

// defaultGrave are the kinds that are grave where a document does not say it.
func defaultGrave() []string { return []string{FindLookalike, FindHidden, FindAccount, FindSecret} }

// Grave returns the kinds of findings that need a tick of the reviewer. A nil document
// has the default.
func (d *Document) Grave() []string {
	if d == nil || !d.saysGrave {
		return defaultGrave()
	}
	return d.grave
}

// graveIn returns the kinds that are grave under d among the findings of r, each once.
func (d *Document) graveIn(r Request) (out []string) {
	if len(r.Findings) == 0 {
		return nil
	}
	grave := d.Grave()
	for _, f := range r.Findings {
		if (slices.Contains(grave, f.Kind) || f.Kind == FindMore && len(grave) > 0) && !slices.Contains(out, f.Kind) {
			out = append(out, f.Kind)
		}
	}
	return out
}

// parseGrave reads the key grave of a document.
func (d *Document) parseGrave(n *yaml.Node, path string) error {
	d.saysGrave, d.grave = true, []string{}
	return sequence(n, path, len(findingKinds), func(n *yaml.Node, path string) error {
		kind, err := text1(n, path, maxID)
		if err != nil {
			return err
		}
		// A misspelt kind would never be grave, although the author relies on it.
		if FindingMeans(kind) == "" {
			return wrong(n, path, "%q: must be a kind of finding: %s", clip(kind), strings.Join(FindingKinds(), ", "))
		}
		if slices.Contains(d.grave, kind) {
			return wrong(n, path, "%q is in the list already", kind)
		}
		d.grave = append(d.grave, kind)
		return nil
	})
}
