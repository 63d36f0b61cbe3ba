package postern

import (
	"encoding/json"
	"errors"
	"flag"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// layers lists every package below internal from the bottom up. A package may
// import only packages of layers below its own: so nothing passes a request
// sideways or back up. To add a package, find its layer here first.
var layers = [][]string{
	{"extract"}, // text out of any bytes
	{"policy", "erofs", "mail", "mailquery", "scan", "leak", "statement", "guest", "mcpgateway", "sandbox/launch", "store", "zone", "framing", "api", "seal", "semaphore", "scrub", "outgoing", "tracing", "dockerfile", "attest", "tarpit"}, // pure rules, formats, and the database
	{"contract", "preview", "rootfs", "erofs/erofstest", "inject", "mailservice", "publicnet", "site", "registry/registrytest", "gmail/gmailtest"},                                                                                           // what is done to outgoing requests; pure
	{"registry", "lineage", "auth", "message", "mailauth", "mailauth/dnstest", "storetest"},
	{"audit", "event"},
	{"signing", "people", "oversight/oversighttest"},
	{"oversight", "domain"},
	{"directory", "lookalike"},
	{"keyring", "delivery"},
	{"quota"},
	{"mailbox", "rulebook", "sandbox", "sandbox/runsc", "volume", "secret", "permit"}, // the nouns
	{"connection", "connector", "oauth", "inside"},
	{"request", "command"}, // requests of sandboxes and their commands, as actions
	{"inspect"},            // the requests inside connections
	{"template", "egress", "webhook", "sink", "notify", "sandbox/gvisor", "sandbox/keeper", "sandbox/sandboxtest", "smtpclient/postfixtest", "imapmail/dovecottest", "smtpserver", "smtpclient", "gmail"}, // the outside world
	{"imapmail", "build"}, // mailboxes over IMAP; templates of projects
	{"imapserver"},        // an inbox in mail programs
	{"run"},               // runs by contract
	{"orders"},            // what clients have sandboxes do
	{"door"},              // what doors over HTTP do alike
	{"e2bapi", "mailapi", "multimail", "mcpserver", "bridge", "console", "notary", "guide", "verification"}, // the doors
	{"emailsandbox"}, // another door to mcpserver's tools
}

// only restricts what a package may import from outside the standard library.
var only = map[string][]string{
	"api": {}, // the client is built from it, by others too: the standard library alone
	"policy": {
		"cel.dev/cel-go/cel", "cel.dev/cel-go/common/types", "cel.dev/cel-go/common/types/ref", "cel.dev/cel-go/ext", "go.yaml.in/yaml/v3", "golang.org/x/net/idna",
	},
	"mail": {
		"golang.org/x/net/html", "golang.org/x/net/html/atom", "golang.org/x/net/html/charset", "golang.org/x/net/idna",
		"github.com/yuin/goldmark", "github.com/yuin/goldmark/extension", "github.com/yuin/goldmark/parser", "github.com/yuin/goldmark/renderer/html", "github.com/yuin/goldmark/util",
	},
	"extract": {
		"golang.org/x/net/html", "golang.org/x/net/html/atom", "golang.org/x/text/encoding/charmap", "github.com/klauspost/compress/zstd", "github.com/ulikunitz/xz/lzma",
	},
	"preview":  {"golang.org/x/image/webp", "golang.org/x/text/encoding/charmap"},
	"outgoing": {}, "inject": {"golang.org/x/net/http/httpguts"}, "seal": {}, "semaphore": {}, "scrub": {}, "leak": {}, "dockerfile": {}, "attest": {},
	"mcpgateway": {}, // part of the guest's program
	"scan":       {"golang.org/x/net/publicsuffix", "golang.org/x/text/unicode/norm"},
	"guest": {
		"connectrpc.com/connect", "github.com/creack/pty", "github.com/fsnotify/fsnotify", "golang.org/x/sys/unix",
		"google.golang.org/protobuf/types/known/timestamppb", "google.golang.org/protobuf/proto",
	},
}

// kits are for tests: nothing else may import them.
var kits = []string{"storetest", "oversight/oversighttest", "mailauth/dnstest", "imapmail/dovecottest", "sandbox/sandboxtest", "smtpclient/postfixtest", "registry/registrytest", "erofs/erofstest", "gmail/gmailtest"}

func TestLayers(t *testing.T) {
	const prefix = "postern/internal/"
	level := map[string]int{}
	for i, l := range layers {
		for _, p := range l {
			level[p] = i
		}
	}
	out, err := exec.Command("go", "list", "-json=ImportPath,GoFiles,Imports", "./internal/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			GoFiles    []string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, prefix)
		if generated(name) || len(p.GoFiles) == 0 { // part of the package above it; tests only
			continue
		}
		lv, ok := level[name]
		if !ok {
			t.Errorf("package %s is in no layer", name)
		}
		allowed, restricted := only[name]
		for _, imp := range p.Imports {
			if in, ok := strings.CutPrefix(imp, prefix); ok {
				if slices.Contains(kits, in) && !slices.Contains(kits, name) {
					t.Errorf("%s imports %s, which is for tests", name, in)
				}
				// What is generated for a package is part of it.
				if strings.HasPrefix(in, name+"/") && generated(in) {
					continue
				}
				if level[in] >= lv {
					t.Errorf("%s (layer %d) imports %s (layer %d)", name, lv, in, level[in])
				}
			} else if restricted && strings.Contains(strings.Split(imp, "/")[0], ".") && !slices.Contains(allowed, imp) {
				t.Errorf("%s imports %s; it may import only %v", name, imp, allowed)
			}
		}
	}
}

func generated(name string) bool { return strings.HasSuffix(name, "pb") }

var update = flag.Bool("update", false, "write golden files anew")

// TestGuestDependencies compares the packages that the guest is built from with
// a golden file: whatever gets into every sandbox is reviewed first.
func TestGuestDependencies(t *testing.T) {
	checkDependencies(t, "cmd/postern-guest", func(string) bool { return true })
}

// TestProgramDependencies compares the packages of others that the program is
// built from with a golden file. A new dependency is a decision, and needs a row
// in CONTRIBUTING.md. So is a package of a known one: gVisor alone has hundreds.
func TestProgramDependencies(t *testing.T) {
	checkDependencies(t, "cmd/postern", func(pkg string) bool { return !strings.HasPrefix(pkg, "postern/") })
}

// TestRuntimeDependencies does the same for the program of sandboxes' processes on
// the host: each package costs every start, and what runs there has capabilities.
func TestRuntimeDependencies(t *testing.T) {
	checkDependencies(t, "cmd/postern-runtime", func(string) bool { return true })
}

// checkDependencies compares the packages outside the standard library that the
// program in dir is built from, as far as keep selects them, with the file
// dependencies.txt in dir.
func checkDependencies(t *testing.T, dir string, keep func(pkg string) bool) {
	t.Helper()
	golden := filepath.Join(dir, "dependencies.txt")
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "./"+dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	got := slices.DeleteFunc(strings.Fields(string(out)), func(pkg string) bool { return !keep(pkg) })
	slices.Sort(got)
	if *update {
		if err := os.WriteFile(golden, []byte(strings.Join(got, "\n")+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Fields(string(b))
	for _, pkg := range got {
		if !slices.Contains(want, pkg) {
			t.Errorf("%s is built from %s, which %s does not list (go test . -update writes it anew)", dir, pkg, golden)
		}
	}
	for _, pkg := range want {
		if !slices.Contains(got, pkg) {
			t.Errorf("%s is no longer built from %s, which %s lists (go test . -update writes it anew)", dir, pkg, golden)
		}
	}
}

// TestDialersUseTheResolver: whatever connects to a name asks the DNS server that the
// operator named. A dialer without a resolver, and Go's default transport, ask
// the system's.
func TestDialersUseTheResolver(t *testing.T) {
	// Those that connect to no name, or are not part of the server.
	allowed := map[string]string{
		"cmd/postern/client.go":            "a local socket",
		"cmd/postern/mailclient.go":        "the command line, on its user's machine",
		"cmd/postern/verify.go":            "likewise",
		"cmd/postern/build.go":             "the DNS server itself, at an address",
		"internal/egress/egress.go":        "addresses that the wall has resolved and judged, and the DNS server",
		"internal/guest/tunnel.go":         "in a sandbox",
		"cmd/postern-guest/pipe.go":        "likewise, its loopback",
		"internal/bridge/bridge.go":        "on its user's machine",
		"internal/verification/machine.go": "the server on its user's machine, by address",
		"internal/smtpclient/client.go":    "where its caller gives no Dial: tests",
	}
	bare := regexp.MustCompile(`net\.Dialer\{[^}]*\}|var \w+ net\.Dialer|net\.Dial\(|net\.DialTimeout\(|http\.Default(Client|Transport)|http\.Client\{\}|http\.(Get|Post|Head)\(|tls\.Dial|net\.(Lookup\w+)\(|net\.DefaultResolver\.`)
	for _, root := range []string{"cmd", "internal"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(filepath.Dir(path), "test") || strings.Contains(path, "testdata") || allowed[filepath.ToSlash(path)] != "" {
				return err
			}
			b, err := os.ReadFile(path)
			for _, m := range bare.FindAllString(string(b), -1) {
				if !strings.Contains(m, "Resolver:") {
					t.Errorf("%s: %s asks the system's DNS server; give it the daemon's resolver", path, m)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
