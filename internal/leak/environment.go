package leak

import (
	"slices"
	"strings"

	"postern/internal/extract"
)

// environmentNames are environment variables that most processes have. The values of
// the first environmentPaths ones are absolute paths.
var environmentNames = []string{
	"PATH", "HOME", "PWD", "SHELL", "OLDPWD", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "JAVA_HOME", "GOPATH", "XDG_RUNTIME_DIR", "NODE_PATH", "_",
	"USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "HOSTNAME", "SHLVL", "EDITOR", "DISPLAY", "TZ", "PYTHONUNBUFFERED", "PYTHON_VERSION", "NODE_VERSION", "DEBIAN_FRONTEND", "E2B_SANDBOX", "E2B_SANDBOX_ID",
}

// environmentPaths is the number of names whose values are absolute paths.
const environmentPaths = 14

// variables are the names of environment variables that were found in one place.
type variables struct {
	all   map[string]bool
	paths int // how many of them have an absolute path
}

// environment reports dumps of environment variables. The attack: code writes its whole
// environment to a file that it calls output.json. Three well-known names, at least two
// of them with absolute paths, are a dump, in any format. Configuration files and
// scripts seldom have as many.
func (f *finder) environment(p extract.Place, text string) {
	v := f.variables[p.Where]
	if v == nil {
		if len(f.variables) > maxReported {
			return
		}
		v = &variables{all: map[string]bool{}}
		f.variables[p.Where] = v
	}
	for i, name := range environmentNames {
		if v.all[name] || !assigned(text, name, i < environmentPaths) {
			continue
		}
		v.all[name] = true
		if i < environmentPaths {
			v.paths++
		}
	}
	if len(v.all) < 3 || v.paths < 2 {
		return
	}
	var names []string
	for name := range v.all {
		names = append(names, name)
	}
	slices.Sort(names)
	f.add(Finding{Flag: FlagEnv, Rule: "environment", Where: p.Where, Detail: written("with "+strings.Join(names, ", "), p)})
}

// assigned reports whether a text has name as a whole word with a value after it:
// NAME=value, "NAME": "value", NAME,value or NAME and a tab. If path is set, the value
// must begin with a slash.
func assigned(text, name string, path bool) bool {
	for i := 0; ; {
		j := strings.Index(text[i:], name)
		if j < 0 {
			return false
		}
		j += i
		i = j + len(name)
		if j > 0 && (tokenByte(text[j-1]) || text[j-1] == '$' || text[j-1] == '{') {
			continue
		}
		rest := strings.TrimLeft(extract.Cut(text[i:], 16), `"'\`)
		mark := strings.TrimLeft(rest, " ")
		if mark == "" || !strings.ContainsRune("=:,\t", rune(mark[0])) {
			continue
		}
		value := strings.TrimLeft(mark[1:], " \t\"'\\")
		if !path && value != "" || path && strings.HasPrefix(value, "/") {
			return true
		}
	}
}
