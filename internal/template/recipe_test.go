package template

import (
	"slices"
	"strings"
	"testing"
)

func testRecipe() recipe {
	return recipe{
		name: "base", suite: "bookworm", variant: "apt",
		packages: []string{"bash", "curl"}, exclude: []string{"/usr/share/doc/*"},
		finish: "true\n", files: []file{{"/a", "1"}, {"/b", "2"}},
	}
}

func TestKey(t *testing.T) {
	want := testRecipe().key()
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
		})
	}
}

func TestBaseRecipe(t *testing.T) {
	r, err := baseRecipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"python-is-python3", "python3", "python3-pip", "python3-numpy", "python3-pandas", "python3-matplotlib", "python3-ipykernel", "nodejs", "git", "curl", "ca-certificates", "sudo"} {
		if !slices.Contains(r.packages, p) {
			t.Errorf("package %s is missing", p)
		}
	}
	for _, f := range r.files {
		if f.text == "" || !strings.HasPrefix(f.path, "/") {
			t.Errorf("file %q: got %d bytes, want some and an absolute path", f.path, len(f.text))
		}
	}
}
