package template

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
)

// testLanguages checks what each language of the interpreter must do, and must not
// do to the others.
func testLanguages(t *testing.T, url string) {
	listed := func(t *testing.T) (out []string) {
		t.Helper()
		_, text := call(t, "GET", url+"/contexts", "")
		var contexts []struct{ Language, Cwd string }
		if err := json.Unmarshal([]byte(text), &contexts); err != nil {
			t.Fatal(err)
		}
		for _, c := range contexts {
			out = append(out, c.Language+" "+c.Cwd)
		}
		return out
	}
	if got := listed(t); !slices.Contains(got, "javascript /home/user") || slices.Contains(got, "java /home/user") {
		t.Errorf("contexts from the start: got %q", got)
	}
	// None of them runs before it is asked for, whatever is listed.
	processes := func(name string) string {
		return run(t, url, "import subprocess\nsubprocess.run(['pgrep', '-c', '-x', '"+name+"'], capture_output=True, text=True).stdout.strip()").text
	}
	for _, name := range []string{"node", "java", "R", "bash"} {
		if got := processes(name); got != "0" {
			t.Errorf("%s before its first use: got %s processes", name, got)
		}
	}

	t.Run("each", func(t *testing.T) {
		for _, tt := range []struct {
			language, set, get, env, err, name, traceback, loop, wait, die string
		}{
			{
				"javascript", "let x = 40; function f(v) { return v + 2 }", "f(x)", "process.env.ONLY_NOW",
				"function g() { throw new TypeError('as we wished') }\ng()", "TypeError", "at g (cell-",
				"console.log('begun'); while (true) {}", "console.log('begun'); await new Promise(() => {})", "process.exit(3)",
			},
			{
				"typescript", "const x: number = 40; enum Two { A = 2 }; interface V { v: number }\nfunction f<T extends number>(v: T): number { return v + Two.A }", "f(x as number)", "process.env.ONLY_NOW!",
				"const g = (): never => { throw new TypeError('as we wished') }\ng()", "TypeError", "at g (cell-",
				"console.log('begun'); for (;;);", "console.log('begun'); await new Promise<void>(() => {})", "process.exit(3)",
			},
			{
				"r", "x <- 40; f <- function(v) v + 2", "f(x)", "Sys.getenv('ONLY_NOW')",
				"g <- function() stop('as we wished'); g()", "ERROR", "g()",
				"cat('begun\\n'); flush.console(); while (TRUE) {}", "cat('begun\\n'); flush.console(); Sys.sleep(1000)", "quit(status = 3)",
			},
			{
				"java", "int x = 40; int f(int v) { return v + 2; }", "f(x)", "System.getenv(\"ONLY_NOW\") + System.getProperty(\"ONLY_NOW\")",
				"void g() { throw new IllegalStateException(\"as we wished\"); }\ng();", "IllegalStateException", "at g, line 1",
				"System.out.println(\"begun\"); while (true) {}", "System.out.println(\"begun\"); Thread.sleep(1000000);", "System.exit(3)",
			},
			{
				"bash", "x=40; f() { echo $(($1 + 2)); }; cd /", "f $x; cd ~", "echo $ONLY_NOW",
				"echo as we wished >&2; (exit 7)", "ExitStatus", "exit status 7",
				"echo begun; while :; do :; done", "echo begun; sleep 1000", "exit 3",
			},
		} {
			t.Run(tt.language, func(t *testing.T) {
				t.Parallel() // it mostly waits for interrupts
				// shown is all that a client sees of an execution but errors.
				shown := func(a answer) string {
					out := a.stdout + a.stderr
					for _, r := range a.results {
						out += r.Text
					}
					return out
				}
				began := time.Now()
				if a := run(t, url, tt.set, "language", tt.language); len(a.errors) != 0 || a.count != 1 || a.order[0] != "number_of_executions" {
					t.Fatalf("first: got %+v", a)
				}
				t.Logf("first use after %v", time.Since(began))
				if a := run(t, url, tt.get, "language", strings.ToUpper(tt.language)); len(a.errors) != 0 || !strings.Contains(shown(a), "42") || a.count != 2 {
					t.Errorf("state: got %+v", a)
				}
				if a := run(t, url, tt.env, "language", tt.language, "env_vars", `{"ONLY_NOW": "it's \"só\" \u6f22"}`); len(a.errors) != 0 || !strings.Contains(strings.ReplaceAll(shown(a), `\"`, `"`), `it's "só" 漢`) {
					t.Errorf("variable of a call: got %+v", a)
				}
				if a := run(t, url, tt.env, "language", tt.language); strings.Contains(shown(a), "only") {
					t.Errorf("variable after its call: got %+v", a)
				}
				a := run(t, url, tt.err, "language", tt.language)
				if len(a.errors) != 1 || a.errors[0].Name != tt.name || !strings.Contains(a.errors[0].Value+a.stderr, "as we wished") || !strings.Contains(a.errors[0].Traceback, tt.traceback) {
					t.Errorf("error: got %+v", a)
				}
				// Whose client goes is interrupted, and keeps its state.
				for _, code := range []string{tt.loop, tt.wait} {
					leaveExecution(t, url, map[string]string{"code": code, "language": tt.language})
					if a := run(t, url, tt.get, "language", tt.language); len(a.errors) != 0 || !strings.Contains(shown(a), "42") || strings.Contains(a.stderr, "lost") {
						t.Errorf("after %q was left: got %+v", code, a)
					}
				}
				if a := run(t, url, tt.die, "language", tt.language); len(a.errors) != 1 || a.errors[0].Name != "KernelDied" || !strings.Contains(a.errors[0].Value, "lost") {
					t.Errorf("death: got %+v", a)
				}
				if a := run(t, url, tt.get, "language", tt.language); strings.Contains(shown(a), "42") || a.count != 1 {
					t.Errorf("after its death: got %+v", a)
				}
				// A context of its own, elsewhere, beside the one that was there.
				_, text := call(t, "POST", url+"/contexts", `{"language": "`+tt.language+`", "cwd": "/tmp"}`)
				var c struct{ ID, Language, Cwd string }
				if err := json.Unmarshal([]byte(text), &c); err != nil || c.Language != tt.language || c.Cwd != "/tmp" {
					t.Fatalf("create: got %s", text)
				}
				where := map[string]string{"javascript": "process.cwd()", "typescript": "process.cwd()", "r": "getwd()", "java": `System.getProperty("user.dir")`, "bash": "pwd"}
				if a := run(t, url, where[tt.language], "context_id", c.ID); !strings.Contains(shown(a), "/tmp") {
					t.Errorf("directory: got %+v", a)
				}
				if status, out := call(t, "POST", url+"/contexts/"+c.ID+"/restart", ""); status != http.StatusNoContent {
					t.Errorf("restart: got %d %s", status, out)
				}
				if status, out := call(t, "DELETE", url+"/contexts/"+c.ID, ""); status != http.StatusNoContent {
					t.Errorf("remove: got %d %s", status, out)
				}
				// The default one is removed as well: its processes end with it.
				_, text = call(t, "GET", url+"/contexts", "")
				var all []struct{ ID, Language string }
				if err := json.Unmarshal([]byte(text), &all); err != nil {
					t.Fatal(err)
				}
				for _, c := range all {
					if c.Language == tt.language {
						call(t, "DELETE", url+"/contexts/"+c.ID, "")
					}
				}
				if a := run(t, url, tt.get, "language", tt.language); a.count != 1 {
					t.Errorf("after it was removed: got %+v", a)
				}
			})
		}
	})

	for _, tt := range []struct{ name, language, code, want string }{
		{"imports", "javascript", "import fs, { existsSync as there } from 'fs'\nimport * as path from 'node:path'\n[there('/'), typeof fs.readFileSync, path.sep]", `[ true, 'function', '/' ]`},
		{"dynamic import and require", "js", "(await import('os')).EOL === require('os').EOL", "true"},
		{"declares again", "js", "let again = 1; class Again {}\nawait 0", ""},
		{"declares again", "js", "let again = 2; class Again {}\nagain", "2"},
		{"promise as a result", "js", "Promise.resolve('text')", "text"},
		{"object", "js", "{a: 1}", "{ a: 1 }"},
		{"what nobody awaits", "js", "async function late() { await new Promise((f) => setTimeout(f, 50)); console.log('late') }\nlate()", "late\n"},
		{"types only", "ts", "import type { Stats } from 'fs'\nnamespace N { export const v = 2 }\nclass P { constructor(public x: number) {} }\nnew P(N.v).x", "2"},
		{"program", "js", "require('child_process').execSync('echo child', { stdio: 'inherit' }); 0", "child\n0"},
		{"declarations", "java", "record P(int x) {}\nvar p = new P(2);\nfor (int i = 0; i < 2; i++) {\n  System.out.println(i);\n}\n// a comment\np.x()", "0\n1\n2"},
		{"streams", "bash", "cat <<E\nhere\nE\ncat; sleep 1000 & disown; echo $0", "here\nbash\n"},
		{"reads nothing", "bash", "read -r line || echo nothing", "nothing\n"},
	} {
		t.Run(tt.language+": "+tt.name, func(t *testing.T) {
			a := run(t, url, tt.code, "language", tt.language)
			if got := a.stdout + a.text; got != tt.want && !strings.HasSuffix(got, tt.want) || len(a.errors) != 0 {
				t.Errorf("got %+v, want %q", a, tt.want)
			}
		})
	}
	if a := run(t, url, "plot(1:3)", "language", "r"); len(a.results) != 1 || a.results[0].PNG == "" {
		t.Errorf("r: picture: got %d results, %+v", len(a.results), a.errors)
	}
	if a := run(t, url, "data.frame(a = 1:2)", "language", "r"); len(a.results) != 1 || !strings.Contains(a.results[0].HTML, "<table") {
		t.Errorf("r: table: got %+v", a)
	}
	if a := run(t, url, "$$.html('<b>x</b>'); $$.png(Buffer.from('png')); ({ [Symbol.for('Jupyter.display')]: () => ({ 'text/plain': 'shown' }) })", "language", "js"); len(a.results) != 3 || a.results[0].HTML != "<b>x</b>" || a.results[1].PNG != "cG5n" || a.text != "shown" {
		t.Errorf("javascript: display: got %+v", a)
	}
	for code, want := range map[string]string{"a b": "SyntaxError", "const y = ;": "SyntaxError"} {
		for _, language := range []string{"javascript", "typescript"} {
			if a := run(t, url, code, "language", language); len(a.errors) != 1 || a.errors[0].Name != want {
				t.Errorf("%s: %s: got %+v", language, code, a)
			}
		}
	}
	if a := run(t, url, `int y = "text";`, "language", "java"); len(a.errors) != 1 || a.errors[0].Name != "CompilationError" || !strings.Contains(a.errors[0].Value, "incompatible types") {
		t.Errorf("java: got %+v", a)
	}
	// None waits for another's: bash ends when JavaScript has run.
	slow := make(chan answer)
	go func() {
		slow <- run(t, url, "until [ -e /tmp/javascript-ran ]; do sleep 0.1; done; echo slow", "language", "bash")
	}()
	run(t, url, "require('fs').writeFileSync('/tmp/javascript-ran', '')", "language", "javascript")
	if a := <-slow; a.stdout != "slow\n" {
		t.Errorf("slow: got %+v", a)
	}
}

// testCharts checks every kind of chart, field by field.
func testCharts(t *testing.T, url string) {
	c := newContext(t, url, `{}`)
	defer call(t, "DELETE", url+"/contexts/"+c, "")
	run(t, url, "import datetime, numpy as np, pandas as pd, matplotlib.pyplot as plt", "context_id", c)
	const planar = `"x_label": null, "y_label": null, "x_unit": null, "y_unit": null`
	for _, tt := range []struct{ name, code, want string }{
		{
			"line", "plt.plot([1, 2], [3.5, 4], label='a'); plt.plot([1, 2, 3], [1, float('nan'), 3]); plt.axhline(2); plt.title('T'); plt.xlabel('Time (s)'); plt.ylabel('Force [N]'); plt.xticks([1, 2], ['one', 'two']); plt.yticks([1.5])",
			`{"type": "line", "title": "T", "x_label": "Time (s)", "y_label": "Force [N]", "x_unit": "s", "y_unit": "N",
			"x_ticks": [1, 2], "x_tick_labels": ["one", "two"], "x_scale": "linear", "y_ticks": [1.5], "y_tick_labels": ["1.5"], "y_scale": "linear",
			"elements": [{"label": "a", "points": [[1, 3.5], [2, 4]]}, {"label": "Line 1", "points": [[1, 1], [2, null], [3, 3]]}]}`,
		},
		{
			"scatter", "plt.scatter([1, 2], [3, 4], label='s'); plt.scatter([5], [6]); plt.xscale('log'); plt.xticks([1, 10], ['1', '10']); plt.yticks([3])",
			`{"type": "scatter", "title": null, ` + planar + `, "x_ticks": [1, 10], "x_tick_labels": ["1", "10"], "x_scale": "log", "y_ticks": [3], "y_tick_labels": ["3"], "y_scale": "linear",
			"elements": [{"label": "s", "points": [[1, 3], [2, 4]]}, {"label": "Group 1", "points": [[5, 6]]}]}`,
		},
		{
			"dates and categories", "plt.plot([datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2, 12)], ['low', 'high']); plt.xticks([datetime.datetime(2024, 1, 1)], ['first'])",
			`{"type": "line", "title": null, ` + planar + `, "x_ticks": ["2024-01-01T00:00:00+00:00"], "x_tick_labels": ["first"], "x_scale": "datetime", "y_ticks": [0, 1], "y_tick_labels": ["low", "high"], "y_scale": "categorical",
			"elements": [{"label": "Line 0", "points": [["2024-01-01T00:00:00", "low"], ["2024-01-02T12:00:00", "high"]]}]}`,
		},
		{
			"bar", "x = np.arange(2)\nplt.bar(x - 0.2, [1, 2], 0.4, label='m'); plt.bar(x + 0.2, [3, 4.5], 0.4); plt.xticks(x, ['p', 'q']); plt.ylabel('n (pieces)')",
			`{"type": "bar", "title": null, "x_label": null, "y_label": "n (pieces)", "x_unit": null, "y_unit": "pieces", "elements": [
			{"label": "p", "group": "m", "value": 1}, {"label": "q", "group": "m", "value": 2}, {"label": "p", "group": "Group 1", "value": 3}, {"label": "q", "group": "Group 1", "value": 4.5}]}`,
		},
		{
			"bars that lie", "plt.barh(['a', 'b'], [2, 3]); plt.xlabel('v'); plt.ylabel('name')",
			`{"type": "bar", "title": null, "x_label": "name", "y_label": "v", "x_unit": null, "y_unit": null, "elements": [{"label": "a", "group": "Group 0", "value": 2}, {"label": "b", "group": "Group 0", "value": 3}]}`,
		},
		{
			"pie", "plt.pie([90, 10], labels=['No', 'Yes'], autopct='%1.1f%%', startangle=90)",
			`{"type": "pie", "title": null, "elements": [{"label": "No", "angle": 324, "radius": 1}, {"label": "Yes", "angle": 36, "radius": 1}]}`,
		},
		{
			"box and whisker", "plt.boxplot([[1, 2, 3, 4, 50], [-20, 2, 3, 4, 5, 30]], labels=['a', 'b'], patch_artist=True, showmeans=True)",
			`{"type": "box_and_whisker", "title": null, ` + planar + `, "elements": [
			{"label": "a", "min": 1, "first_quartile": 2, "median": 3, "third_quartile": 4, "max": 4, "outliers": [50]},
			{"label": "b", "min": 2, "first_quartile": 2.25, "median": 3.5, "third_quartile": 4.75, "max": 5, "outliers": [-20, 30]}]}`,
		},
		{
			"boxes that lie", "plt.boxplot([[1, 2, 3, 4, 5]], labels=['a'], patch_artist=True, vert=False); plt.xlabel('v')",
			`{"type": "box_and_whisker", "title": null, "x_label": null, "y_label": "v", "x_unit": null, "y_unit": null, "elements": [{"label": "a", "min": 1, "first_quartile": 2, "median": 3, "third_quartile": 4, "max": 5, "outliers": []}]}`,
		},
		{
			"super chart", "f, axes = plt.subplots(1, 2); f.suptitle('Both'); axes[0].pie([1], labels=['all']); axes[1].add_artist(plt.Circle((0, 0), 1)); axes[1].set_title('C')",
			`{"type": "superchart", "title": "Both", "elements": [{"type": "pie", "title": null, "elements": [{"label": "all", "angle": 360, "radius": 1}]}, {"type": "unknown", "title": "C", "elements": []}]}`,
		},
		{"unknown", "plt.imshow([[1, 2]]); plt.title('I')", `{"type": "unknown", "title": "I", "elements": []}`},
		{"nothing drawn", "plt.subplots()", `{}`},
		// None of these may cost the picture.
		{"a million points", "plt.plot(range(1_000_000))", ``},
		{"a hostile line", "l, = plt.plot([1, 2], [3, 4]); l.get_xdata = lambda *a, **k: 1/0; plt.gcf().draw = None", ``},
		{"a hostile label", "plt.plot([1, 2], label='x' * 1_000_000)", ``},
		{"no numbers", "plt.plot([float('inf'), 1], [1, 2]); plt.xticks([]); plt.yticks([])", `{"type": "line", "title": null, ` + planar + `, "x_ticks": [], "x_tick_labels": [], "x_scale": "linear", "y_ticks": [], "y_tick_labels": [], "y_scale": "linear", "elements": [{"label": "Line 0", "points": [[null, 1], [1, 2]]}]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := run(t, url, "plt.close('all')\n"+tt.code+"\nplt.show()", "context_id", c)
			if tt.name == "a hostile line" {
				return // what it does to its picture is its own
			}
			if len(a.results) != 1 || a.results[0].PNG == "" || len(a.errors) != 0 {
				t.Fatalf("got %d results, errors %+v, stderr %q", len(a.results), a.errors, a.stderr)
			}
			if tt.want == "" {
				if got := a.results[0].Chart; len(got) > 2 {
					t.Errorf("got %.300s, want no chart", got)
				}
				return
			}
			if got, want := canonical(t, a.results[0].Chart), canonical(t, []byte(tt.want)); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
	if a := run(t, url, "'alive'", "context_id", c); a.text != "alive" {
		t.Errorf("afterwards: got %+v", a)
	}

	a := run(t, url, "pd.DataFrame({'n': [1, 2], 'f': [0.5, None], 't': pd.to_datetime(['2024-01-02', None]), 's': ['x', None], 3: [True, False]})", "context_id", c)
	if got, want := fmt.Sprint(a.results[0].Data), "map[3:[true false] f:[0.5 <nil>] n:[1 2] s:[x <nil>] t:[2024-01-02T00:00:00 <nil>]]"; got != want || a.text == "" || !strings.Contains(a.results[0].HTML, "<table") {
		t.Errorf("table: got %s, want %s", got, want)
	}
	for code, want := range map[string]string{"[1, 'a', None]": `[1,"a",null]`, "{'a': {1: [True]}}": `{"a":{"1":[true]}}`, "[object]": "", "(1, 2)": "", "{(1, 2): 3}": "", "[float('nan')]": ""} {
		if a := run(t, url, code, "context_id", c); string(a.results[0].JSON) != want || a.text == "" {
			t.Errorf("%s: got %s, want %s", code, a.results[0].JSON, want)
		}
	}
}

// canonical returns JSON with sorted keys and without spaces.
func canonical(t *testing.T, b []byte) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v: %.200q", err, b)
	}
	out, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
