package mcpserver

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"postern/internal/auth"
)

// A Set names a group of tools. Agents choose worse among many tools, so they
// are shown the core set unless somebody asks for more.
type Set string

// The sets.
const (
	Core      Set = "core"      // the thirteen tools of email-sandbox, and email_account; the default
	Drafts    Set = "drafts"    // drafts beyond saving one
	Oversight Set = "oversight" // waiting for mail, and cancelling, changing and listing proposals
	Domains   Set = "domains"   // domains of the project to send from; for a project's key
	Network   Set = "network"   // what the network refused, and asking for it; for agents in sandboxes, who have it unless they choose others
	Code      Set = "code"      // a sandbox to run code in; for agents outside; a project's key has these alone
	Runs      Set = "runs"      // jobs with a contract, which people review; for agents outside, also with a project's key
	All       Set = "all"
)

// Sets lists the sets.
var Sets = []Set{Core, Drafts, Oversight, Domains, Network, Code, Runs, All}

// SetsHeader is the header that names sets and tools; the query's parameter
// "tools" does, too. It only chooses what is shown: what may be done depends on
// the key.
const SetsHeader = "Postern-Tools"

// helpTool explains the others. Everybody has it.
const helpTool = "email_help"

// maxSets bounds the names in one request.
const maxSets = 50

// chosen returns the tools that the request selects, in the order of the table.
func chosen(r *http.Request, who auth.Principal) ([]*tool, error) {
	inside, project := who.Kind == auth.Sandbox, who.Kind == auth.Project
	var names []string
	for _, v := range append(r.URL.Query()["tools"], r.Header.Values(SetsHeader)...) {
		names = append(names, strings.FieldsFunc(v, func(r rune) bool { return r == ',' || r == ' ' })...)
	}
	if len(names) > maxSets {
		return nil, fmt.Errorf("%w: tools: are more than %d names", errArgument, maxSets)
	}
	if len(names) == 0 {
		switch names = []string{string(Core)}; {
		case who.Tools != "":
			names = []string{string(All)} // of them those that the key names
		case inside:
			names = append(names, string(Network))
		case project:
			names = []string{string(Code)}
		}
	}
	tools, err := choose(names)
	if err != nil {
		return nil, err
	}
	asked := len(tools)
	tools = slices.DeleteFunc(tools, func(t *tool) bool {
		// What is left out here cannot be called either.
		if t.Name != helpTool && who.MayCall(t.Name) != nil {
			return true
		}
		switch t.set {
		case Network:
			return !inside
		case Code:
			return inside // it is in a computer already
		case Runs:
			// The attack: code in a sandbox proposes a run that may do more than the sandbox.
			return inside
		case Domains:
			// Only a project's key manages domains. Who asks for them by name is told
			// so; nobody else is bothered with them.
			return !project && !slices.Contains(names, string(Domains)) && !slices.Contains(names, t.Name)
		case Core, Drafts, Oversight, All:
		}
		return project
	})
	if project && len(tools) == 0 && asked > 0 {
		return nil, fmt.Errorf("a project key opens no inbox: it has the tools of the sets code, runs and domains (?tools=code,runs,domains); the others need an inbox key (pib_…): %w", auth.ErrForbidden)
	}
	return tools, nil
}

// ToolNames returns the names of all tools.
func ToolNames() (out []string) {
	for _, t := range catalog() {
		out = append(out, t.Name)
	}
	return out
}

// Offered returns the names of the tools that who is offered unless its client asks for
// others, in the order in which they are listed. Nobody else but keys of inboxes and
// projects, grants and sandboxes is offered any.
func Offered(who auth.Principal) (names []string) {
	switch who.Kind {
	case auth.Sandbox, auth.Agent, auth.Grant, auth.Project:
	case auth.Recovery, auth.Person, auth.System:
		return nil
	}
	tools, err := chosen(&http.Request{URL: &url.URL{}}, who)
	if err != nil { // unreachable: nothing was asked for
		return nil
	}
	for _, t := range tools {
		names = append(names, t.Name)
	}
	return names
}

// Title returns what people call a tool, or the empty string if there is none of that
// name.
func Title(name string) string {
	if t := find(name); t != nil {
		return t.Title
	}
	return ""
}

// CheckTools returns an error unless each of names is a set or a tool.
func CheckTools(names []string) error {
	_, err := choose(names)
	return err
}

// choose returns the tools that names, of sets and of tools, mean. email_help is
// always one of them.
func choose(names []string) ([]*tool, error) {
	for _, n := range names {
		if !slices.Contains(Sets, Set(n)) && find(n) == nil {
			return nil, fmt.Errorf("%w: tools: %q is neither a set (core, drafts, oversight, domains, network, code, runs, all) nor a tool", errArgument, short(n))
		}
	}
	var out []*tool
	for _, t := range catalog() {
		if t.Name == helpTool || slices.Contains(names, t.Name) || slices.Contains(names, string(t.set)) || slices.Contains(names, string(All)) {
			out = append(out, t)
		}
	}
	return out, nil
}

// find returns the tool of that name, or nil.
func find(name string) *tool {
	i := slices.IndexFunc(catalog(), func(t *tool) bool { return t.Name == name })
	if i < 0 {
		return nil
	}
	return catalog()[i]
}
