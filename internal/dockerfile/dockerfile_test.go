package dockerfile_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"postern/internal/dockerfile"
)

func TestDockerfileBecomesSteps(t *testing.T) {
	got, err := dockerfile.Parse(`# syntax=docker/dockerfile:1
ARG VERSION=12
FROM docker.io/debian:${VERSION}-slim AS app
LABEL maintainer="ann"
ARG MODE
ENV GREETING="good morning" NAME='Ann' A\ B=c
ENV PATH /opt/bin:$PATH
RUN apt-get update && \
    # what it needs
    apt-get install -y \
      curl
run ["echo", "it's", "$HOME"]
WORKDIR "/srv/app"
COPY --chown=app:app --chmod=755 a.txt "b c.txt" ./
ADD ["src dir", "/srv/"]
EXPOSE 80
ENTRYPOINT ["python3", "-m"]
CMD ["http.server", "80 80"]
USER app`)
	if err != nil {
		t.Fatal(err)
	}
	want := dockerfile.File{
		From: "docker.io/debian:12-slim", StartCmd: `python3 -m http.server '80 80'`,
		Steps: []dockerfile.Step{
			{"USER", []string{"root"}},
			{"WORKDIR", []string{"/"}},
			{"ENV", []string{"MODE", ""}},
			{"ENV", []string{"GREETING", "good morning", "NAME", "Ann", "A B", "c"}},
			{"ENV", []string{"PATH", "/opt/bin:$PATH"}},
			{"RUN", []string{"apt-get update &&     apt-get install -y       curl"}},
			{"RUN", []string{`echo 'it'\''s' '$HOME'`}},
			{"WORKDIR", []string{"/srv/app"}},
			{"COPY", []string{"a.txt", "./", "app", "755"}},
			{"COPY", []string{"b c.txt", "./", "app", "755"}},
			{"COPY", []string{"src dir", "/srv/", "", ""}},
			{"USER", []string{"app"}},
		},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	got, err = dockerfile.Parse("FROM x\r\nCMD sleep 1 && true\r\n")
	if err != nil || got.StartCmd != "sleep 1 && true" || len(got.Steps) != 4 || got.Steps[2].Args[0] != "user" || got.Steps[3].Args[0] != "/home/user" {
		t.Errorf("got %+v, %v, want the user and the directory of E2B", got, err)
	}
}

// TestUnsupportedInstructionsAreRefused: an instruction that was ignored would give another
// template than its author expects.
func TestUnsupportedInstructionsAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "FROM is missing",
		"RUN true":                            "line 1: RUN is before FROM",
		"FROM scratch":                        "name an image",
		"FROM $X":                             "X has no value",
		"FROM --platform=linux/arm64 x":       "--platform is not supported",
		"FROM x\nFROM y":                      "line 2: a second FROM",
		"FROM x\nRUN --mount=type=secret y":   "--mount is not supported",
		"FROM x\nRUN <<EOF\ntrue\nEOF":        "here-documents",
		"FROM x\nCOPY <<EOF /x\nEOF":          "here-documents",
		"FROM x\nCOPY --from=y /a /b":         "--from is not supported",
		"FROM x\nCOPY a":                      "a target",
		"FROM x\nCOPY a b c":                  "end with a slash",
		"FROM x\nCOPY $A b":                   "variables",
		"FROM x\nCOPY --chmod=u+x a b":        "octal",
		"FROM x\nCOPY --chown=a:b a b":        "the group",
		"FROM x\nCOPY \"a b":                  "not closed",
		"FROM x\nADD https://example.com/a b": "download it with RUN",
		"FROM x\nENV A":                       "NAME=VALUE",
		"FROM x\nENV A=b C":                   "NAME=VALUE",
		"FROM x\nENV A='$B'":                  "literal $",
		"FROM x\nWORKDIR $HOME":               "variables",
		"FROM x\nWORKDIR":                     "no argument",
		"FROM x\nSHELL [\"/bin/sh\"]":         "not supported",
		"FROM x\n\n# c\nONBUILD RUN x":        "line 4",
		"# escape=`\nFROM x":                  "use a backslash",
	} {
		if got, err := dockerfile.Parse(text); !errors.Is(err, dockerfile.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want an error with %q", text, got, err, want)
		}
	}
}

// FuzzParse: whatever a file holds, there is an error, or an image and steps with arguments.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"FROM x\nCOPY a b\n", "FROM x\nRUN a \\\n#\n b", "ARG A=b\nFROM $A\nENV A 'b' \\", "FROM x\nCMD [\"a\"]\nENTRYPOINT b", "\ufeff# escape=`\nFROM x AS y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := dockerfile.Parse(text)
		if err != nil {
			if !errors.Is(err, dockerfile.ErrInvalid) {
				t.Errorf("error %v", err)
			}
			return
		}
		if got.From == "" {
			t.Error("no image")
		}
		for _, s := range got.Steps {
			switch {
			case len(s.Args) == 0, s.Type == "COPY" && len(s.Args) != 4, s.Type == "ENV" && len(s.Args)%2 != 0:
				t.Errorf("step %+v", s)
			case s.Type == "COPY":
				if p, err := dockerfile.Source(s.Args[0]); err == nil && (strings.HasPrefix(p, "/") || p == ".." || strings.HasPrefix(p, "../")) {
					t.Errorf("source %q is outside", p)
				}
			}
		}
	})
}
