package template

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHostSources(t *testing.T) {
	const key = "/usr/share/keyrings/debian-archive-keyring.gpg"
	mirrors := filepath.Join(t.TempDir(), "mirrors.list")
	write(t, mirrors, "# ours\nhttps://mirror.example/debian priority:1\nhttps://second.example/debian\n")
	tests := []struct {
		name  string
		files map[string]string // below /etc/apt
		want  []string          // lines
	}{
		{"none", nil, nil},
		{
			"one line",
			map[string]string{"sources.list": "# x\ndeb http://d.example/debian bookworm main contrib\ndeb-src http://d.example/debian bookworm main\ndeb http://s.example/security bookworm-security/ main # x\n"},
			[]string{"deb http://d.example/debian bookworm main\n", "deb http://s.example/security bookworm-security main\n"},
		},
		{
			"one line with options",
			map[string]string{"sources.list": "deb  [ arch=amd64 signed-by=" + key + " ] http://d.example/debian bookworm main\n"},
			[]string{"deb [signed-by=" + key + "] http://d.example/debian bookworm main\n"},
		},
		{
			"deb822",
			map[string]string{"sources.list.d/debian.sources": "Types: deb deb-src\n# c\nURIs: http://d.example/debian\nSuites: bookworm bookworm-updates bookworm-backports\nComponents: main\nSigned-By: " + key + "\n\nTypes: deb\nURIs: http://s.example/security\nSuites:\n bookworm-security\nComponents: main\n"},
			[]string{
				"deb [signed-by=" + key + "] http://d.example/debian bookworm main\n",
				"deb [signed-by=" + key + "] http://d.example/debian bookworm-updates main\n",
				"deb http://s.example/security bookworm-security main\n",
			},
		},
		{
			"key in the text",
			map[string]string{"sources.list.d/debian.sources": "Types: deb\nURIs: http://d.example/debian\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n"},
			[]string{"deb http://d.example/debian bookworm main\n"},
		},
		{
			"disabled, other archive, other release, disc, other file",
			map[string]string{
				"sources.list.d/off.sources": "Types: deb\nURIs: http://d.example/debian\nSuites: bookworm\nComponents: main\nEnabled: no\n",
				"sources.list.d/docker.list": "deb https://docker.example/debian bookworm stable\n",
				"sources.list.d/node.list":   "deb https://node.example/ nodistro main\n",
				"sources.list":               "deb cdrom:[Debian]/ bookworm main\ndeb file:/srv/debian bookworm main\ndeb http://d.example/debian trixie main\n",
				"sources.list.d/x.list.save": "deb http://d.example/debian bookworm main\n",
			},
			nil,
		},
		{
			"said twice",
			map[string]string{"sources.list": "deb http://d.example/debian bookworm main\ndeb http://d.example/debian bookworm main\n"},
			[]string{"deb http://d.example/debian bookworm main\n"},
		},
		{
			"cloud image",
			map[string]string{"sources.list.d/debian.sources": "Types: deb\nURIs: mirror+file://" + mirrors + "\nSuites: bookworm\nComponents: main\n"},
			[]string{"deb https://mirror.example/debian bookworm main\n"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, text := range tt.files {
				write(t, filepath.Join(dir, name), text)
			}
			src, err := hostSources(dir, "bookworm")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, s := range src {
				got = append(got, s.line())
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("sources differ (-want +got):\n%s", d)
			}
		})
	}
}

// TestSourcePublic: the host's credentials must not get into a sandbox.
func TestSourcePublic(t *testing.T) {
	s := parseSources("deb https://me:secret@mirror.example/debian bookworm main\n", "bookworm")
	if len(s) != 1 {
		t.Fatalf("got %d sources, want 1", len(s))
	}
	if got, want := s[0].line(), "deb https://me:secret@mirror.example/debian bookworm main\n"; got != want {
		t.Errorf("for the build: got %q, want %q", got, want)
	}
	if got, want := s[0].public().line(), "deb https://mirror.example/debian bookworm main\n"; got != want {
		t.Errorf("for the sandbox: got %q, want %q", got, want)
	}
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
