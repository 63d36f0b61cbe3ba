package request

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/extract"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// Inside is the scheme of a request that stands for a call of a tool in a sandbox, by
// somebody outside: it goes to no host.
const Inside = "mcp"

const (
	// maxArguments bounds the arguments that a rule is asked about.
	maxArguments = 64 << 10 // bytes
	maxBatch     = 50       // messages in one request
	maxName      = 200      // bytes of a tool's or a server's name
)

// A Call is a call of a tool of a server of the Model Context Protocol.
type Call struct {
	Server    string // name of a server in a sandbox, or the host of one elsewhere
	Tool      string
	Arguments map[string]any

	size  int // bytes of the arguments
	index int // of its message in the request
}

// toolUse is the first line of the payload of an action of kind [policy.KindTool]. The
// encoded request follows it.
type toolUse struct {
	Server string `json:"server"`
	Tool   string `json:"tool"`
	Index  int    `json:"index,omitempty"`
}

// errMessage means that a body cannot be judged as a message. The text says why.
var errMessage = errors.New("is no message of the Model Context Protocol that can be judged")

// ParseMessages parses a body of JSON-RPC, one message or a batch. The attack: a message
// that its receiver reads differently: names that are there twice, or in capitals, which
// some parsers take for the same; what only some parsers take for JSON.
func ParseMessages(body []byte) ([]map[string]json.RawMessage, error) {
	if !utf8.Valid(body) {
		return nil, fmt.Errorf("%w: it is not UTF-8", errMessage)
	}
	if err := checkNames(body); err != nil {
		return nil, fmt.Errorf("%w: %w", errMessage, err)
	}
	var list []json.RawMessage
	if trimmed := bytes.TrimSpace(body); bytes.HasPrefix(trimmed, []byte("[")) {
		if err := json.Unmarshal(body, &list); err != nil || len(list) > maxBatch {
			return nil, fmt.Errorf("%w: want at most %d messages", errMessage, maxBatch)
		}
	} else {
		list = []json.RawMessage{trimmed}
	}
	var out []map[string]json.RawMessage
	for _, b := range list {
		var m map[string]json.RawMessage
		if err := json.Unmarshal(b, &m); err != nil || m == nil {
			return nil, fmt.Errorf("%w: it is no object", errMessage)
		}
		out = append(out, m)
	}
	return out, nil
}

// checkNames returns an error unless body is one JSON value without a name that is twice
// in one object, and without the protocol's names in other letters.
func checkNames(body []byte) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	ours := 1 // the depth of params; what is in arguments has names of its own
	if bytes.HasPrefix(bytes.TrimSpace(body), []byte("[")) {
		ours = 2
	}
	if err := checkValue(d, 0, ours); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows it")
	}
	return nil
}

func checkValue(d *json.Decoder, depth, ours int) error {
	t, err := d.Token()
	if err != nil {
		return errors.New("it is not JSON")
	}
	brace, ok := t.(json.Delim)
	if !ok {
		return nil
	}
	if depth > 100 {
		return errors.New("it is nested too deeply")
	}
	seen := map[string]bool{}
	for d.More() {
		if brace == '{' {
			t, err := d.Token()
			name, ok := t.(string)
			if err != nil || !ok {
				return errors.New("it is not JSON")
			}
			low := strings.ToLower(name)
			if seen[name] || low != name && slices.Contains([]string{"jsonrpc", "id", "method", "params", "name", "arguments"}, low) && depth <= ours {
				return fmt.Errorf("the name %q is there twice, or in other letters", clip(name, 40))
			}
			seen[name] = true
		}
		if err := checkValue(d, depth+1, ours); err != nil {
			return err
		}
	}
	_, err = d.Token()
	if err != nil {
		return errors.New("it is not JSON")
	}
	return nil
}

// callOf returns the call of a message, if it is one. Where names a server in a sandbox
// by what its tools' names begin with, server is empty.
func callOf(m map[string]json.RawMessage, server, separator string) (c Call, ok bool, err error) {
	var method string
	_ = json.Unmarshal(m["method"], &method) // one that is no text names no method
	if method != "tools/call" {
		return c, false, nil
	}
	var p map[string]json.RawMessage
	if json.Unmarshal(m["params"], &p) != nil || json.Unmarshal(p["name"], &c.Tool) != nil || c.Tool == "" || len(c.Tool) > maxName {
		return c, true, fmt.Errorf("%w: params.name: want the name of a tool, at most %d bytes", errMessage, maxName)
	}
	c.Server = server
	if separator != "" {
		if c.Server, c.Tool, ok = strings.Cut(c.Tool, separator); !ok {
			c.Server, c.Tool = "", c.Server
		}
	}
	if raw, given := p["arguments"]; given {
		c.size = len(raw)
		if err := json.Unmarshal(raw, &c.Arguments); err != nil {
			return c, true, fmt.Errorf("%w: params.arguments: must be an object", errMessage)
		}
	}
	return c, true, nil
}

// NewInside returns the request that stands for the call m of a tool in a sandbox, whose
// name has the server's before separator. Its body is the method and the parameters that
// matter: no ID, which is another one for each call. It is not ok for other messages.
func NewInside(m map[string]json.RawMessage, separator string) (r *outgoing.Request, ok bool, err error) {
	c, ok, err := callOf(m, "", separator)
	if !ok || err != nil {
		return nil, ok, err
	}
	var p map[string]json.RawMessage
	if err := json.Unmarshal(m["params"], &p); err != nil { // unreachable: it was parsed
		return nil, true, err
	}
	p = maps.Clone(p)
	delete(p, "_meta")
	body, err := Encode(map[string]any{"method": "tools/call", "params": p})
	if err != nil {
		return nil, true, err
	}
	return &outgoing.Request{
		Method: http.MethodPost, Scheme: Inside, Host: c.Server, Path: "/" + c.Tool, Header: http.Header{"Content-Type": {"application/json"}},
		Query: separator, Body: body, Whole: true, Size: int64(len(body)),
	}, true, nil
}

// Encode returns v as JSON on one line, with characters of HTML as they are: people read it.
func Encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// calls returns the calls of r.
func calls(r *outgoing.Request) (out []Call, err error) {
	if r.Scheme == Inside {
		m, err := ParseMessages(r.Body)
		if err != nil {
			return nil, err
		}
		c, ok, err := callOf(m[0], "", r.Query)
		if err == nil && !ok {
			err = errMessage
		}
		return []Call{c}, err
	}
	list, err := ParseMessages(r.Body)
	if err != nil {
		return nil, err
	}
	for i, m := range list {
		c, ok, err := callOf(m, r.Host, "")
		if err != nil {
			return nil, err
		}
		if c.index = i; ok {
			out = append(out, c)
		}
	}
	return out, nil
}

// mayCall reports whether r could be a message with a call of a tool: a body that is
// JSON, or looks like it.
func mayCall(r *outgoing.Request) bool {
	if r.Scheme == Inside {
		return true
	}
	if r.Whole && len(r.Body) == 0 {
		return false
	}
	methods, unknown := r.Methods()
	if unknown == "" && !slices.ContainsFunc(methods, func(m string) bool { return m != http.MethodGet && m != http.MethodHead }) {
		return false
	}
	if strings.Contains(strings.ToLower(strings.Join(r.Header.Values("Content-Type"), ",")), "json") {
		return true
	}
	if !r.Whole { // what it begins with is not known
		return true
	}
	b := bytes.TrimLeft(r.Body, " \t\r\n\ufeff")
	return len(b) > 0 && (b[0] == '{' || b[0] == '[')
}

// Reads reports whether the body of r must be read before it is judged: a rule or a
// switch is about calls of tools, and it could be one.
func (a *Admission) Reads(ctx context.Context, who auth.Principal, r *outgoing.Request) bool {
	f, err := a.rules.InForce(ctx, who.Project)
	return err == nil && f.Policy != nil && concernsTools(f, r) && mayCall(r)
}

func concernsTools(f connection.InForce, r *outgoing.Request) bool {
	return r.Scheme == Inside || f.Policy.Concerns(policy.KindTool, r.Host) || slices.ContainsFunc(f.Switches, func(s oversight.Switch) bool {
		return s.Scope == oversight.ScopeCapability && s.Target == string(policy.KindTool)
	})
}

// tools returns what a person has to agree to of the tools that r calls. If the effect
// of the verdict is not Allow, the request is refused whatever a person says.
func (a *Admission) tools(f connection.InForce, who auth.Principal, r *outgoing.Request) (qs []question, v policy.Verdict) {
	v = policy.Verdict{Effect: policy.Allow}
	if !concernsTools(f, r) || !mayCall(r) {
		return nil, v
	}
	if !r.Whole {
		return nil, refused("a rule is about calls of tools, and the body of the request is too long to be one")
	}
	coded := strings.ToLower(strings.Join(r.Header.Values("Content-Encoding"), ","))
	if coded != "" && coded != "identity" {
		return nil, refused("a rule is about calls of tools, and the body of the request is compressed: send it as it is")
	}
	list, err := calls(r)
	if err != nil {
		return nil, refused("a rule is about calls of tools, and the body of the request " + clip(err.Error(), 300))
	}
	for _, c := range list {
		facts := c.facts(who, r)
		if v := f.Stopped(facts); v.Effect != policy.Allow {
			return nil, v
		}
		w := byRules(f.Policy, facts, nil)
		if r.Scheme != Inside {
			methods, unknown := r.Methods()
			if unknown != "" && f.Policy.ByMethod(policy.KindTool, r.Host) {
				return nil, refused(unknownMethod + unknown)
			}
			for _, m := range methods[1:] {
				q := c.facts(who, r)
				q.HTTP.Method = m
				if v := byRules(f.Policy, q, nil); rank(v.Effect) > rank(w.Effect) {
					facts, w = q, v
				}
			}
		}
		if c.size > maxArguments && f.Policy.Concerns(policy.KindTool, facts.HTTP.Host) {
			return nil, refused(fmt.Sprintf("the arguments of the call have %d bytes; rules are asked about at most %d", c.size, maxArguments))
		}
		switch w.Effect {
		case policy.Allow:
		case policy.Ask:
			qs = append(qs, question{kind: policy.KindTool, call: c, why: w.Rule, facts: facts, verdict: w})
		default:
			return nil, w
		}
	}
	return qs, v
}

// facts is what policy is asked about a call.
func (c *Call) facts(who auth.Principal, r *outgoing.Request) policy.Request {
	q := policy.Request{
		Kind: policy.KindTool, Via: "link", Size: int64(c.size), Sandbox: who.ID, Template: who.Template, Time: time.Now(), Arguments: c.Arguments,
		HTTP: &policy.HTTP{}, Detail: map[string]string{"server": c.Server, "tool": c.Tool},
	}
	if r.Scheme == Inside {
		q.Via = "mcp"
		return q
	}
	q.To, q.HTTP.Host, q.HTTP.Method, q.HTTP.Path = []string{r.Host}, r.Host, r.Method, normalPath(r.Path)
	for _, u := range secrets(r) {
		q.HTTP.Secrets = append(q.HTTP.Secrets, u.Secret)
	}
	return q
}

// Call decides on r, made by [NewInside] for a call of a tool in the sandbox who, and
// waits while a person decides. Allow means that it may be made once, now.
func (a *Admission) Call(ctx context.Context, who auth.Principal, r *outgoing.Request) policy.Verdict {
	v := a.Judge(ctx, who, r)
	if v.Effect == policy.Ask {
		v = a.Hold(ctx, who, r, v)
	}
	return v
}

// Offered reports whether a tool in the sandbox who is listed: not one whose call
// without arguments a rule denies.
func (a *Admission) Offered(ctx context.Context, who auth.Principal, server, tool string) bool {
	f, err := a.rules.InForce(ctx, who.Project)
	if err != nil || f.Policy == nil {
		return false
	}
	c := Call{Server: server, Tool: tool}
	q := c.facts(who, &outgoing.Request{Scheme: Inside})
	return f.Stopped(q).Effect == policy.Allow && byRules(f.Policy, q, nil).Effect != policy.Deny
}

// host returns where q's request goes: a host, or a server in the sandbox.
func (q *question) host() string {
	if q.kind == policy.KindTool && q.facts.HTTP.Host == "" {
		return "the server " + q.call.Server
	}
	return q.facts.HTTP.Host
}

// noun is what a note calls q's request, before [question.host].
func (q *question) noun() string {
	if q.kind == policy.KindTool {
		return "call of"
	}
	return "request to"
}

// decodeTool returns the call of an action, and the request that makes it.
func decodeTool(payload []byte) (c Call, r *outgoing.Request, err error) {
	head, rest, ok := bytes.Cut(payload, []byte("\n"))
	var u toolUse
	if !ok || json.Unmarshal(head, &u) != nil {
		return c, nil, errors.New("read call of tool: its first line cannot be read")
	}
	if r, err = outgoing.Decode(rest); err != nil {
		return c, nil, err
	}
	list, err := calls(r)
	if err != nil {
		return c, nil, fmt.Errorf("read call of tool: %w", err)
	}
	i := slices.IndexFunc(list, func(c Call) bool { return c.index == u.Index })
	if i < 0 || list[i].Server != u.Server || list[i].Tool != u.Tool {
		return c, nil, errors.New("read call of tool: the request does not make it")
	}
	return list[i], r, nil
}

// showTool shows a call: its server, its tool and its arguments.
func showTool(act oversight.Action) (oversight.View, error) {
	c, r, err := decodeTool(act.Payload)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", act.ID, err)
	}
	where := "in the sandbox " + act.Request.Sandbox
	if r.Scheme != Inside {
		where = "elsewhere: code in the sandbox " + act.Request.Sandbox + " calls it at " + r.URL()
	}
	v := oversight.View{
		Title:  c.Tool + " of " + c.Server,
		Fields: []oversight.Field{{Name: "Server", Value: c.Server}, {Name: "Tool", Value: c.Tool}, {Name: "Runs", Value: where}},
		Raw:    r.Body,
	}
	// As they are in the body, whose numbers Go's would lose digits of.
	raw := json.RawMessage("{}")
	list, err := ParseMessages(r.Body)
	if err != nil { // unreachable: it was parsed
		return oversight.View{}, err
	}
	var p map[string]json.RawMessage
	if json.Unmarshal(list[c.index]["params"], &p) == nil && p["arguments"] != nil {
		raw = p["arguments"]
	}
	var text bytes.Buffer
	if err := json.Indent(&text, raw, "", "  "); err != nil { // unreachable: it was parsed
		return oversight.View{}, err
	}
	shown := parts{marks: marker(r)}
	v.Text = extract.Visible(flat(shown.split(text.String())))
	if len(v.Text) > maxShown {
		v.Text, v.Partial = clip(v.Text, maxShown), fmt.Sprintf("only the beginning of its arguments of %d bytes is shown", len(raw))
	}
	if shown.masked {
		v.Notes = append(v.Notes, "texts that look like secrets are masked in this view; if approved, the call is made with them unmasked")
		if v.Partial == "" {
			v.Partial = "texts that look like secrets are masked"
		}
	}
	v.Facts("The tool", "Server", "Tool", "Runs")
	if r.Scheme != Inside {
		v.AddPanel("Where the call goes", oversight.FormHosts, "", oversight.PanelRow{Name: "Host", Value: r.Host, Note: strings.TrimPrefix(base(r), r.Scheme+"://"+r.Host), Field: "-"})
	}
	v.Panels = append(v.Panels, arguments(raw, &shown))
	if r.Scheme != Inside {
		v.Notes = append(v.Notes, notes(r, nil, body{})...)
		if len(list) > 1 {
			v.Notes = append(v.Notes, fmt.Sprintf("the request has %d messages; each call that a rule asks about is an action of its own", len(list)))
		}
	}
	return v, nil
}

// maxArgumentRows bounds the arguments of a call that have a row.
const maxArgumentRows = 200

// arguments returns the panel of a call's arguments: each in a row, with its type.
func arguments(raw []byte, shown *parts) oversight.Panel {
	p := oversight.Panel{Name: "Arguments", Form: oversight.FormTable}
	row := func(name, value string) {
		r := oversight.PanelRow{Name: flat(shown.split(name)), Value: value, Note: jsonType(value), Field: "-"}
		var text string
		var pretty bytes.Buffer
		switch {
		case json.Unmarshal([]byte(value), &text) == nil && r.Note == "text":
			r.Value = text
		case json.Indent(&pretty, []byte(value), "", "  ") == nil:
			r.Value = pretty.String()
		}
		r.Value = flat(shown.split(r.Value))
		if len(r.Value) > maxShown {
			r.Value, r.Warn = clip(r.Value, maxShown), true
			r.Note += fmt.Sprintf(", only the beginning of %d bytes", len(value))
		}
		if slices.ContainsFunc(p.Rows, func(o oversight.PanelRow) bool { return o.Name == r.Name }) {
			// The attack: a reviewer reads the first value, and the tool takes the last.
			r.Warn = true
			r.Note += ", a name that is there before"
		}
		p.Rows = append(p.Rows, r)
	}
	list, err := oversight.Members(raw)
	if err != nil {
		row("(all of them)", string(raw))
		return p
	}
	if len(list) == 0 {
		p.Says = "The call has no arguments."
	}
	for i, m := range list {
		if i == maxArgumentRows {
			p.Says = fmt.Sprintf("Only %d of its %d arguments have a row. All of them are in the JSON below.", maxArgumentRows, len(list))
			break
		}
		row(m.Name, m.Value)
	}
	return p
}

// jsonType names the type of a JSON value for people.
func jsonType(value string) string {
	switch value[:min(1, len(value))] {
	case `"`:
		return "text"
	case "{":
		return "object"
	case "[":
		return "list"
	case "t", "f":
		return "yes or no"
	case "n":
		return "nothing"
	}
	return "number"
}
