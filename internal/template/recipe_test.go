package template

import (
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

func testRecipe() recipe {
	return recipe{
		name: "base", suite: "bookworm", variant: "apt",
		packages: []string{"bash", "curl"}, exclude: []string{"/usr/share/doc/*"},
		npm:   []npmPackage{{Package: "node", Version: "1.0.0", Integrity: "sha512-x", Files: map[string]string{"a": "/a"}}},
		links: []file{{"/l", "a"}}, finish: "true\n", files: []file{{"/a", "1"}, {"/b", "2"}},
	}
}

func TestKey(t *testing.T) {
	want, packages := testRecipe().key(), testRecipe().packagesKey()
	if got := testRecipe().key(); got != want {
		t.Errorf("key of the same recipe: got %s, want %s", got, want)
	}
	// Everything that decides what is built must change the key, or a program
	// would start sandboxes from what an older one built.
	tests := map[string]func(*recipe){
		"name":            func(r *recipe) { r.name = "other" },
		"suite":           func(r *recipe) { r.suite = "trixie" },
		"variant":         func(r *recipe) { r.variant = "minbase" },
		"package added":   func(r *recipe) { r.packages = append(r.packages, "git") },
		"package removed": func(r *recipe) { r.packages = r.packages[:1] },
		"packages joined": func(r *recipe) { r.packages = []string{"bashcurl"} },
		"package moved":   func(r *recipe) { r.exclude, r.packages = append([]string{"curl"}, r.exclude...), r.packages[:1] },
		"exclude":         func(r *recipe) { r.exclude = nil },
		"npm's version":   func(r *recipe) { r.npm[0].Version = "1.0.1" },
		"npm's digest":    func(r *recipe) { r.npm[0].Integrity = "sha512-y" },
		"npm's files":     func(r *recipe) { r.npm[0].Files = map[string]string{"a": "/b"} },
		"npm removed":     func(r *recipe) { r.npm = nil },
		"link":            func(r *recipe) { r.links[0].text = "b" },
		"finish":          func(r *recipe) { r.finish += "false\n" },
		"file's text":     func(r *recipe) { r.files[0].text = "3" },
		"file's path":     func(r *recipe) { r.files[0].path = "/c" },
		"file removed":    func(r *recipe) { r.files = r.files[:1] },
		"text slides":     func(r *recipe) { r.files[0].text, r.files[1].path = "1/", "b" },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			r := testRecipe()
			change(&r)
			if r.key() == want {
				t.Error("key did not change")
			}
			small := slices.Contains([]string{"name", "finish", "link", "file's text", "file's path", "file removed", "text slides"}, name)
			if (r.packagesKey() == packages) != small {
				t.Errorf("packages are installed again: %v, want %v", small, !small)
			}
		})
	}
}

func TestDefinitions(t *testing.T) {
	rs, err := recipes()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, r := range rs {
		for _, n := range r.names() {
			if names[n] {
				t.Errorf("two templates have the name %s", n)
			}
			names[n] = true
		}
		for _, f := range r.files {
			if f.text == "" || !strings.HasPrefix(f.path, "/") {
				t.Errorf("%s: file %q: got %d bytes, want some and an absolute path", r.name, f.path, len(f.text))
			}
		}
		if !slices.Contains(r.packages, "sudo") || !slices.Contains(r.packages, "ca-certificates") {
			t.Errorf("%s: got %v, want sudo and certificates", r.name, r.packages)
		}
	}
	base := rs[0]
	for _, p := range []string{"python-is-python3", "python3", "python3-pip", "python3-venv", "python3-numpy", "python3-pandas", "python3-matplotlib", "python3-requests", "python3-ipykernel", "git", "curl", "jq", "g++", "make"} {
		if !slices.Contains(base.packages, p) {
			t.Errorf("package %s is missing", p)
		}
	}
	if !slices.ContainsFunc(base.npm, func(n npmPackage) bool { return n.Package == "npm" }) || len(base.npm) < 2 {
		t.Errorf("npm packages: got %v, want node and npm", base.npm)
	}
	if !slices.ContainsFunc(base.files, func(f file) bool { return f.path == "/opt/postern/interpreter/__main__.py" }) || base.ready == nil {
		t.Error("the interpreter is missing")
	}
	if slim := rs[1]; slim.ready != nil || len(slim.npm) != 0 || len(slim.packages) > 10 {
		t.Errorf("slim: got %+v", slim)
	}
}

func TestDefinitionRefuses(t *testing.T) {
	const good = "name: x\nsuite: bookworm\nvariant: apt\npackages: [bash]\n"
	from := fstest.MapFS{"recipe/f": {Data: []byte("x")}}
	if _, err := parseRecipe([]byte(good+"files: {/f: f}\nfinish: [f]\n"), from); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{
		"name: x\n", good + "package: [curl]\n", strings.Replace(good, "bash", "-oAPT::x", 1), strings.Replace(good, "bash", `"a,b"`, 1),
		good + "files: {etc: f}\n", good + "files: {/a/../b: f}\n", good + "files: {/f: missing}\n", good + "finish: [missing]\n",
		good + "npm: [{package: p, version: 1.0.0}]\n", good + "npm: [{package: p, version: 1.0.0, integrity: sha1-AAAA}]\n",
	} {
		if _, err := parseRecipe([]byte(bad), from); err == nil {
			t.Errorf("accepted:\n%s", bad)
		}
	}
}
