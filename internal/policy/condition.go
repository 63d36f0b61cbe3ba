package policy

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"reflect"
	"strings"
	"sync"
	"time"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/ext"
	"go.yaml.in/yaml/v3"
)

// Limits on the cost of one evaluation, in CEL's units: about one for each step and
// for each ten bytes that are read. The attack: a mail with a thousand recipients meets
// a condition that compares each recipient with every other.
const (
	maxCost   = 100_000 // of one condition
	maxCosts  = 400_000 // of all conditions of a document, for one request
	maxMemory = 1 << 20 // elements in memory at a time
	maxRegexp = 1000    // instructions of a regular expression
	maxNodes  = 2000    // of an expression, macros unfolded
	maxNested = 2       // nested loops
	maxDepth  = 40      // of brackets
)

// A condition is a CEL expression over the facts of a request.
type condition struct {
	source string
	node   *yaml.Node // where it stands

	ast      *cel.Ast
	byMethod bool // it looks at the method of a request
	once     sync.Once
	program  cel.Program
	err      error // of the program

	partlyOnce sync.Once
	partly     cel.Program // evaluates with some variables unknown
	partlyErr  error
}

// A syntaxError has the place of an error in an expression: line and column, counted
// from 1.
type syntaxError struct {
	line, column int
	text         string
}

func (e *syntaxError) Error() string { return e.text }

// fileFacts is an [Attachment] as conditions see it.
type fileFacts struct {
	Name string `cel:"name"`
	Type string `cel:"type"` // lower case
	Size int64  `cel:"size"` // bytes
	Ext  string `cel:"ext"`  // of the name: ".exe"; lower case
}

// historyFacts is a [History] as conditions see it.
type historyFacts struct {
	Sent    int64 `cel:"sent"`
	Known   int64 `cel:"known"`
	Replies bool  `cel:"replies"`
}

// Variables are the variables of conditions with their types, for people.
var Variables = []struct{ Name, Type, Meaning string }{
	{"kind", "string", "what is to happen: email.send, net.connect, …"},
	{"mode", "string", "of the inbox: read_only, gated_all, gated_send, monitored, autonomous"},
	{"inbox", "string", "its address"},
	{"via", "string", "the door: rest, mcp, smtp, …"},
	{"from", "string", "of mail that arrives: the proved sender, or empty"},
	{"to", "list(string)", "every recipient, Bcc too, lower case, the domain in ASCII"},
	{"domains", "list(string)", "the recipients' domains, each once, in ASCII: xn--mnchen-3ya.de"},
	{"listed", "bool", "the inbox's allow list has every recipient"},
	{"size", "int", "bytes: of the mail, or of a request's body"},
	{"files", "list(file)", "attachments, each with name, type, size (bytes) and ext (\".pdf\")"},
	{"flags", "list(string)", "what content checks found: secret, private_key, personal_data, hidden_text, …"},
	{"sandbox", "string", "id of the sandbox that proposed it, or empty"},
	{"template", "string", "what that sandbox was started from"},
	{"history", "history", "sent (mails that each recipient got before), known (recipients that got one), replies (each has written to the inbox)"},
	{"machines", "list(string)", "of outgoing mail: the recipients that seem to be programs, whose last mail here was automatic"},
	{"answers", "int", "of outgoing mail: automatic answers of the last hour between the inbox and the recipient with the most"},
	{"time", "timestamp", "when it was proposed"},
	{"hour", "int", "of time, 0 to 23, in the document's zone"},
	{"weekday", "string", "of time, mon to sun, in the document's zone"},
	{"host", "string", "of a request (net.request, secret.use): its host, lower case, without port; empty for other kinds"},
	{"method", "string", "of a request: GET, POST, …"},
	{"path", "string", "of a request: escaped, begins with /"},
	{"query", "map(string, list(string))", "of a request: the values of each parameter"},
	{"headers", "map(string, string)", "of a request: header fields by their names in lower case"},
	{"secrets", "list(string)", "names of the secrets that are put on a request"},
	{"arguments", "map(string, dyn)", "of a tool's call (mcp.call): its arguments; detail.server and detail.tool name it"},
	{"packages", "map(string, list(string))", "the hosts of package registries: packages.npm, packages.pypi, …"},
	{"detail", "map(string, string)", "what this kind alone has: host and port of a connection, the mode asked for"},
}

var environment = sync.OnceValues(func() (*cel.Env, error) {
	file, history := cel.ObjectType("policy.fileFacts"), cel.ObjectType("policy.historyFacts")
	list := cel.ListType(cel.StringType)
	return cel.NewEnv(
		ext.NativeTypes(reflect.TypeFor[fileFacts](), reflect.TypeFor[historyFacts](), ext.ParseStructTags(true)),
		cel.Variable("kind", cel.StringType), cel.Variable("mode", cel.StringType), cel.Variable("inbox", cel.StringType),
		cel.Variable("via", cel.StringType), cel.Variable("from", cel.StringType), cel.Variable("to", list),
		cel.Variable("domains", list), cel.Variable("listed", cel.BoolType), cel.Variable("size", cel.IntType),
		cel.Variable("files", cel.ListType(file)), cel.Variable("flags", list), cel.Variable("sandbox", cel.StringType),
		cel.Variable("template", cel.StringType), cel.Variable("history", history), cel.Variable("time", cel.TimestampType),
		cel.Variable("machines", list), cel.Variable("answers", cel.IntType),
		cel.Variable("hour", cel.IntType), cel.Variable("weekday", cel.StringType),
		cel.Variable("detail", cel.MapType(cel.StringType, cel.StringType)),
		cel.Variable("host", cel.StringType), cel.Variable("method", cel.StringType), cel.Variable("path", cel.StringType),
		cel.Variable("query", cel.MapType(cel.StringType, list)), cel.Variable("headers", cel.MapType(cel.StringType, cel.StringType)),
		cel.Variable("arguments", cel.MapType(cel.StringType, cel.DynType)),
		cel.Variable("secrets", list), cel.Variable("packages", cel.MapType(cel.StringType, list)),
		// 'mail.example.com'.under('example.com'), and the domain itself. With
		// endsWith alone notexample.com is let through, too.
		cel.Function("under", cel.MemberOverload("string_under_string", []*cel.Type{cel.StringType, cel.StringType}, cel.BoolType,
			cel.BinaryBinding(func(name, domain ref.Val) ref.Val { return types.Bool(under(name, domain)) }))),
		cel.ParserExpressionSizeLimit(maxExpression), cel.ParserRecursionLimit(maxDepth), cel.ParserErrorRecoveryLimit(4),
		cel.ExpressionNodeLimit(maxNodes), cel.RegexProgramSizeLimit(maxRegexp),
		cel.ASTValidators(cel.ValidateDurationLiterals(), cel.ValidateTimestampLiterals(), cel.ValidateRegexLiterals(), cel.ValidateComprehensionNestingLimit(maxNested)),
		cel.DefaultUTCTimeZone(true),
	)
})

func under(name, domain ref.Val) bool {
	n, ok := name.Value().(string)
	d, ok2 := domain.Value().(string)
	if !ok || !ok2 || d == "" {
		return false
	}
	if i := strings.LastIndexByte(n, '@'); i >= 0 { // of an address
		n = n[i+1:]
	}
	n, _ = Host(n)
	d, _ = Host(strings.TrimPrefix(d, "."))
	if d == "" {
		return false
	}
	return n == d || strings.HasSuffix(n, "."+d)
}

// check parses and type-checks the expression.
func (c *condition) check() error {
	env, err := environment()
	if err != nil {
		return fmt.Errorf("make environment: %w", err)
	}
	ast, issues := env.Compile(c.source)
	if issues.Err() != nil {
		e := issues.Errors()[0]
		return &syntaxError{max(e.Location.Line(), 1), max(e.Location.Column()+1, 1), clip(e.Message)}
	}
	if ast.OutputType() != cel.BoolType {
		return &syntaxError{1, 1, fmt.Sprintf("is a %s; a condition is true or false", ast.OutputType())}
	}
	c.ast = ast
	for _, r := range ast.NativeRep().ReferenceMap() {
		c.byMethod = c.byMethod || r.Name == "method"
	}
	return nil
}

// locate returns the error err of c with its line in the document's text.
func (c *condition) locate(rule string, text []byte, err error) error {
	var e *syntaxError
	if !errors.As(err, &e) {
		return fmt.Errorf("%w: line %d: rule %s: when: %w", ErrDocument, c.node.Line, rule, err)
	}
	line, column := c.node.Line, e.column
	switch {
	case c.node.Style&yaml.LiteralStyle != 0:
		line += e.line
		if lines := strings.Split(string(text), "\n"); line-1 < len(lines) {
			column += len(lines[line-1]) - len(strings.TrimLeft(lines[line-1], " "))
		}
	case c.node.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0:
		column += c.node.Column
	case c.node.Style&yaml.FoldedStyle != 0: // its lines are one here
		return fmt.Errorf("%w: line %d: rule %s: when, character %d: %s", ErrDocument, line, rule, column, e.text)
	default:
		column += c.node.Column - 1
	}
	return fmt.Errorf("%w: line %d, column %d: rule %s: when: %s", ErrDocument, line, column, rule, e.text)
}

// holds evaluates the condition on facts, and returns the cost in CEL's units.
func (c *condition) holds(facts map[string]any) (ok bool, cost uint64, err error) {
	c.once.Do(func() {
		env, err := environment()
		if err == nil {
			c.program, err = env.Program(c.ast, cel.EvalOptions(cel.OptOptimize), cel.CostLimit(maxCost), cel.MemoryLimit(maxMemory))
		}
		c.err = err
	})
	if c.err != nil {
		return false, 0, c.err
	}
	v, detail, err := c.program.Eval(facts)
	cost = maxCost
	if n := detail.ActualCost(); n != nil {
		cost = *n
	}
	if err != nil {
		return false, cost, err
	}
	b, isBool := v.Value().(bool)
	if !isBool {
		return false, cost, fmt.Errorf("is %s, not true or false", v.Type().TypeName())
	}
	return b, cost, nil
}

// possible reports whether the condition could hold if known are the values of some
// variables and nothing is known of the others. It is true where that cannot be
// found out.
func (c *condition) possible(known map[string]any) bool {
	c.partlyOnce.Do(func() {
		env, err := environment()
		if err == nil {
			c.partly, err = env.Program(c.ast, cel.EvalOptions(cel.OptPartialEval), cel.CostLimit(maxCost), cel.MemoryLimit(maxMemory))
		}
		c.partlyErr = err
	})
	if c.partlyErr != nil {
		return true
	}
	var unknown []*cel.AttributePatternType
	for _, v := range Variables {
		if v.Name == "packages" { // the same for every request
			continue
		}
		if _, ok := known[v.Name]; !ok {
			unknown = append(unknown, cel.AttributePattern(v.Name))
		}
	}
	known = maps.Clone(known)
	known["packages"] = registryHosts()
	vars, err := cel.PartialVars(known, unknown...)
	if err != nil {
		return true
	}
	v, _, err := c.partly.Eval(vars)
	if err != nil {
		return true
	}
	b, isBool := v.(types.Bool)
	return !isBool || bool(b) // an unknown is not a bool
}

// facts returns the values of a condition's variables for r.
func (d *Document) facts(r Request) map[string]any {
	files := make([]fileFacts, len(r.Files))
	for i, f := range r.Files {
		files[i] = fileFacts{Name: f.Name, Type: strings.ToLower(f.Type), Size: f.Size, Ext: extension(f.Name)}
	}
	detail := r.Detail
	if detail == nil {
		detail = map[string]string{}
	}
	h := HTTP{}
	if r.HTTP != nil {
		h = *r.HTTP
	}
	if h.Query == nil {
		h.Query = map[string][]string{}
	}
	if h.Headers == nil {
		h.Headers = map[string]string{}
	}
	if h.Secrets == nil {
		h.Secrets = []string{}
	}
	arguments := r.Arguments
	if arguments == nil {
		arguments = map[string]any{}
	}
	machines := make([]string, len(r.Machines))
	for i, m := range r.Machines {
		machines[i] = Address(m.Address)
	}
	local := r.Time.In(d.zone)
	return map[string]any{
		"kind": string(r.Kind), "mode": string(r.Mode), "inbox": r.Inbox, "via": r.Via, "from": r.From, "to": addresses(r.To), "domains": domains(r.To),
		"listed": r.Listed, "size": r.Size, "files": files, "flags": lower(r.Flags), "sandbox": r.Sandbox, "template": r.Template,
		"history":  historyFacts{r.History.Sent, int64(r.History.Known), r.History.Replies},
		"machines": machines, "answers": r.Answers,
		"time": r.Time, "hour": int64(local.Hour()), "weekday": weekdays[local.Weekday()], "detail": detail,
		"host": h.Host, "method": h.Method, "path": h.Path, "query": h.Query, "headers": h.Headers, "secrets": h.Secrets,
		"packages": registryHosts(), "arguments": arguments,
	}
}

var weekdays = [...]string{time.Sunday: "sun", time.Monday: "mon", time.Tuesday: "tue", time.Wednesday: "wed", time.Thursday: "thu", time.Friday: "fri", time.Saturday: "sat"}

func lower(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = strings.ToLower(s)
	}
	return out
}

func addresses(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = Address(s)
	}
	return out
}

// domains returns those of addresses, each once and in their order.
func domains(addresses []string) []string {
	out := []string{}
	seen := map[string]bool{}
	for _, a := range addresses {
		d, _ := Host(a[strings.LastIndexByte(a, '@')+1:])
		if !seen[d] {
			seen[d] = true
			out = append(out, d)
		}
	}
	return out
}

// extension returns that of a file's name as the system that opens it sees it.
// The attack: "invoice.exe. ", whose dot and space Windows drops.
func extension(name string) string {
	name = strings.TrimRight(strings.ToLower(name), ". \t\u00a0")
	return strings.TrimSpace(path.Ext(name[strings.LastIndexAny(name, `/\`)+1:]))
}
