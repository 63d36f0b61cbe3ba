package console

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/domain"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/secret"
)

//go:embed templates
var files embed.FS

// A page has a body, and what the layout shows around it.
type page struct {
	Name    string // of its template
	Title   string
	Who     auth.Principal // the signed-in person; without a kind if nobody is signed in
	Here    string         // its place in the navigation, or empty
	Refresh int            // seconds until a browser without scripts loads the page again; 0 means never
	Tick    int            // seconds after which the script renews it; 0 means never
	Watch   string         // what the script watches: "queue", or the id of an action; empty means the count alone
	Mark    string         // state of what is watched, as in an event of [liveHandlers.events]
	Passkey bool           // its script asks the browser for a passkey
	Shell   bool           // its scripts are those of a terminal
	Push    bool           // its script turns push messages on
	Body    any

	shape string // of the layout; empty means "page"
}

// PasskeyJS returns the address of the script that asks for a passkey.
func (page) PasskeyJS() string { return "/console/static/passkey.js?v=" + version() }

// TerminalJS, XtermJS, FitJS and XtermCSS return the addresses of a terminal's scripts and
// style.
func (page) TerminalJS() string { return "/console/static/terminal.js?v=" + version() }
func (page) XtermJS() string    { return "/console/static/xterm.js?v=" + version() }
func (page) FitJS() string      { return "/console/static/xterm-fit.js?v=" + version() }
func (page) XtermCSS() string   { return "/console/static/xterm.css?v=" + version() }

// PushJS returns the address of the script that turns push messages on.
func (page) PushJS() string { return "/console/static/push.js?v=" + version() }

// Manifest returns the address of the manifest with which a browser installs the console.
func (page) Manifest() string { return "/console/static/manifest.webmanifest?v=" + version() }

// JS returns the address of the script that keeps pages current.
func (page) JS() string { return "/console/static/live.js?v=" + version() }

// KeysJS returns the address of the script that handles keys.
func (page) KeysJS() string { return "/console/static/keys.js?v=" + version() }

// Shape returns the class of the layout: "review" has panes of its own and fills the
// window, "page" has margins.
func (p page) Shape() string { return or(p.shape, "page") }

// CSS returns the address of the style.
func (page) CSS() string { return "/console/static/style.css?v=" + version() }

// pages are the templates by name, each with the layout and the parts. They are
// parsed on first use: the processes of a sandbox are this program too, and
// would otherwise parse them at start.
var pages = sync.OnceValue(func() map[string]*template.Template {
	shared := template.Must(template.New("layout").Funcs(funcs).ParseFS(files, "templates/layout.html", "templates/parts.html", "templates/sprite.html", "templates/parts-*.html"))
	names, err := files.ReadDir("templates")
	if err != nil {
		panic(err) // unreachable: they are embedded
	}
	out := map[string]*template.Template{}
	for _, f := range names {
		if name := strings.TrimSuffix(f.Name(), ".html"); name != "layout" && name != "sprite" && !strings.HasPrefix(name, "parts") {
			out[name] = template.Must(template.Must(shared.Clone()).ParseFS(files, path.Join("templates", f.Name())))
		}
	}
	return out
})

// render answers with a page. It renders the whole page before it sends the
// status: half a page with status 200 would hide the failure.
func (s *Server) render(ctx context.Context, w http.ResponseWriter, status int, p page) error {
	var b bytes.Buffer
	if err := pages()[p.Name].ExecuteTemplate(&b, "layout.html", p); err != nil {
		return fmt.Errorf("render %s: %w", p.Name, err)
	}
	out := s.putNames(ctx, p.Who.Project, b.Bytes())
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(out)))
	w.WriteHeader(status)
	_, _ = w.Write(out) // the browser may be gone
	return nil
}

var funcs = template.FuncMap{
	"icon":   icon,
	"spell":  spell,
	"effect": leftAs,
	"upper":  upper,
	"ends":   func() any { return ends },
	"graves": func(fs []oversight.Finding) int {
		return len(slices.DeleteFunc(slices.Clone(fs), func(f oversight.Finding) bool { return f.Tick == "" }))
	},
	"ascii":         asciiName,
	"weekdays":      func() []time.Weekday { return weekdays },
	"quietOn":       quietOn,
	"since":         func(t time.Time) string { return span(time.Since(t)) },
	"day":           func(t time.Time) string { return t.UTC().Format("2 Jan 15:04 UTC") },
	"hour":          func(t time.Time) string { return t.UTC().Format("15:04 UTC") },
	"initials":      initials,
	"line":          line,
	"tag":           tag,
	"tone":          tone,
	"exit":          exit,
	"lines":         lines,
	"ago":           func(t time.Time) string { return ago(time.Since(t)) },
	"used":          func(t time.Time) string { return used(auth.UseResolution, t) },
	"usedsecret":    func(t time.Time) string { return used(secret.UseResolution, t) },
	"until":         untilTime,
	"utc":           func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
	"stamp":         func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") },
	"rfc3339":       func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"size":          size,
	"quota":         quotaText,
	"count":         count,
	"who":           mark,
	"whoPlain":      markPlain,
	"thousands":     func(n any) string { i, _ := strconv.ParseInt(fmt.Sprint(n), 10, 64); return thousands(i) },
	"age":           func(t time.Time) string { return howLong(time.Since(t)) },
	"howlong":       howLong,
	"bytesFor":      bytesFor,
	"dayName":       func(t time.Time) string { return t.UTC().Format("Monday, 2 January 2006") },
	"via":           func(v string) string { return or(doors[v], v) },
	"verb":          audit.Verb.Means,
	"detail":        detail,
	"stateOf":       stateOf,
	"meaning":       meaning,
	"scopeName":     func(x oversight.Scope) string { return or(scopeNames[x], string(x)) },
	"dict":          dict,
	"approverNames": approverNames,
	"policyInputs":  policyInputs,
	"flag":          func(f string) string { return strings.ReplaceAll(f, "_", " ") },
	"mode":          policy.Mode.Means,
	"modes":         modeChoices,
	"isOpen":        isOpen,
	"kind":          func(k any) string { return policy.Kind(fmt.Sprint(k)).Title() }, // a policy.Kind, or a string of a form
	"domainMeaning": domainMeaning,
	"recordName":    func(k domain.Kind) string { return or(recordNames[k], string(k)) },
	"resultName":    func(r domain.Result) string { return or(resultNames[r], string(r)) },
	"partKind":      partKind,
	"partMay":       partMay,
	"short":         short,
	"duration":      wholeTime,
	"days":          span,
	"deliveryState": func(d delivery.State) string { return or(deliveryNames[d], string(d)) },
	"roleMeans":     func(r auth.Role) string { return roleMeans[r] },
	"factorName":    func(f string) string { return or(factorNames[f], f) },
	"partName":      partName,
	"runOf":         runOf,
	"verdictName":   func(v string) string { return strings.ReplaceAll(v, "_", " ") },
	"artifactTone":  artifactTone,
	"argv":          argv,
	"took":          func(start time.Time, end *time.Time) string { return tookTime(&start, end) },
	"clock":         func(t time.Time) string { return t.UTC().Format(time.TimeOnly) },
	"monthDay":      func(t time.Time) string { return t.UTC().Format("2 Jan") },
	"firstLine":     firstLine,
	"begin":         func(s string, n int) string { return s[:min(n, len(s))] },
	"int":           func(n int64) int { return int(n) },
	"fileLink":      fileLink,
	"dirLink":       dirLink,
	"spent":         spent,
	"mib":           func(n int64) int64 { return n >> 20 },
	"endState":      func(s sandbox.State) string { return or(endStates[s], string(s)) },
}

// dict returns the argument of a template that takes more than one value. pairs are names
// and values in turn.
func dict(pairs ...any) map[string]any {
	out := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		out[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return out
}

// icon returns a symbol of the layout's sprite. Its name is a constant of a template,
// never text from outside.
func icon(name string) template.HTML {
	return template.HTML(`<svg class="i" aria-hidden="true"><use href="#i-` + template.HTMLEscapeString(name) + `"/></svg>`) //nolint:gosec // escaped
}

// initials returns one or two letters that stand for a name beside it.
func initials(name string) string {
	var out []rune
	start := true
	for _, r := range name {
		letter := unicode.IsLetter(r) || unicode.IsDigit(r)
		if letter && start && len(out) < 2 {
			out = append(out, unicode.ToUpper(r))
		}
		start = !letter
	}
	return string(out)
}

// upper makes the first letter of a sentence upper case, unless the sentence begins with a
// name or an address: those stay as they are written.
func upper(s string) string {
	if first, _, _ := strings.Cut(s, " "); strings.ContainsAny(first, ".@-_/0123456789") {
		return s
	}
	r, n := utf8.DecodeRuneInString(s)
	return string(unicode.ToUpper(r)) + s[n:]
}

// firstLine returns the first non-empty line of a text, for a list.
func firstLine(text string) string {
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); l != "" {
			return mail.Printable(l, 160)
		}
	}
	return ""
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// lines makes invisible characters visible and keeps the lines.
func lines(s string) string { return mail.PrintableLines(s, maxText) }

func ago(d time.Duration) string {
	if d < 10*time.Second {
		return "just now"
	}
	return span(d) + " ago"
}

// used says when something was last used, if a use so soon after another is not recorded.
func used(resolution time.Duration, t time.Time) string {
	d := time.Since(t)
	switch {
	case d >= resolution:
		return ago(d)
	case resolution == time.Minute:
		return "in the last minute"
	}
	return fmt.Sprintf("in the last %d min", int(resolution.Minutes()))
}

func until(d time.Duration) string {
	if d <= 0 {
		return "now"
	}
	return "in " + span(d)
}

// untilTime says how far away t is, or its date if it is two years away or more.
func untilTime(t time.Time) string {
	if d := time.Until(t); d < 2*365*24*time.Hour {
		return until(d)
	}
	return "on " + t.UTC().Format(time.DateOnly)
}

func span(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return strconv.Itoa(int(d.Seconds())) + " s"
	case d < 2*time.Hour:
		return strconv.Itoa(int(d.Minutes())) + " min"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d.Hours())) + " h"
	}
	return strconv.Itoa(int(d.Hours()/24)) + " days"
}

// wholeTime writes a time that is whole minutes or hours.
func wholeTime(d time.Duration) string {
	switch {
	case d == time.Hour:
		return "an hour"
	case d%time.Hour == 0:
		return fmt.Sprintf("%d hours", d/time.Hour)
	}
	return fmt.Sprintf("%d minutes", d/time.Minute)
}

// size writes a number of bytes for people, and exactly.
func size(n int64) string {
	switch {
	case n == 1:
		return "1 byte"
	case n < 1000:
		return strconv.FormatInt(n, 10) + " bytes"
	case n < 1000*1000:
		return fmt.Sprintf("%.1f kB (%d bytes)", float64(n)/1e3, n)
	}
	return fmt.Sprintf("%.1f MB (%d bytes)", float64(n)/1e6, n)
}

// short writes a number of bytes in a few letters.
func short(n int64) string {
	switch {
	case n < 1<<10:
		return strconv.FormatInt(n, 10) + " B"
	case n < 1<<20:
		return strconv.FormatInt(n>>10, 10) + " KiB"
	}
	return strconv.FormatInt(n>>20, 10) + " MiB"
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}

// doors names the interfaces through which requests come.
var doors = map[string]string{"mcp": "MCP", "rest": "REST", "smtp": "SMTP"}

// A pair is one detail of an entry.
type pair struct{ Name, Value string }

func detail(e audit.Entry) []pair {
	var f map[string]string
	if err := json.Unmarshal([]byte(e.Detail), &f); err != nil {
		return []pair{{"detail", e.Detail}}
	}
	var out []pair
	for _, k := range slices.Sorted(maps.Keys(f)) {
		out = append(out, pair{k, f[k]})
	}
	return out
}

// stateOf names an action's state for people.
func stateOf(a oversight.Action) string {
	switch a.State {
	case oversight.Pending:
		return "waiting"
	case oversight.Denied:
		_, byPerson := a.Person()
		switch {
		case a.Decider == "":
			return "denied by policy"
		case a.Lapsed():
			return "denied: expired"
		case !byPerson:
			return "stopped"
		}
		return "rejected"
	case oversight.Approved:
		if a.Attempts > 0 {
			return "retrying"
		}
		return "approved"
	case oversight.Scheduled:
		return "scheduled"
	case oversight.Executing, oversight.Done, oversight.Failed, oversight.Cancelled:
		return string(a.State)
	case oversight.Unknown:
		return "outcome unknown"
	}
	return string(a.State)
}

// effect says what has not happened to an action that was not carried out.
func effect(k policy.Kind) string {
	if k == policy.KindRun || k == policy.KindExec {
		return "started"
	}
	if k == policy.KindExport {
		return "left"
	}
	return "been sent"
}

// meaning explains an action's state to the viewer.
func meaning(a oversight.Action) string {
	switch a.State {
	case oversight.Pending:
		return "Waiting for a decision. Nothing has " + effect(a.Kind) + "."
	case oversight.Scheduled:
		return "Nothing has been sent. It is queued for a decision at its scheduled time."
	case oversight.Denied, oversight.Cancelled:
		if done := effect(a.Kind); done != "been sent" {
			return "Nothing has " + done + "."
		}
		return "Nothing was sent."
	case oversight.Approved:
		if a.Attempts > 0 {
			return "An attempt failed without effect. It is retried automatically."
		}
		if time.Until(a.Due) > time.Second {
			return "Scheduled for " + a.Due.Format("2006-01-02 15:04:05 UTC") + ". You can cancel it until then."
		}
		return "It will be carried out soon. This page refreshes automatically."
	case oversight.Executing:
		return "It is being carried out. This page refreshes automatically."
	case oversight.Done:
		return "It was carried out."
	case oversight.Failed:
		return "It failed, completely or in part. It is not retried."
	case oversight.Unknown:
		return "It may or may not have taken effect. It is not retried until a person resolves it."
	}
	return ""
}

var endStates = map[sandbox.State]string{
	sandbox.Creating: "starting",
	sandbox.Running:  "running",
	sandbox.Pausing:  "being paused",
	sandbox.Paused:   "paused",
	sandbox.Resuming: "being resumed",
	sandbox.Killed:   "ended",
	sandbox.Failed:   "failed to start",
	sandbox.Lost:     "lost",
}

// Style returns the style of the pages, for other pages that look alike.
func Style() []byte {
	b, err := static.ReadFile("static/style.css")
	if err != nil {
		panic(err) // unreachable: it is embedded
	}
	return b
}
