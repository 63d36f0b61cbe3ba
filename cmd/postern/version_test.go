package main

import (
	"runtime/debug"
	"testing"
)

func TestVersionOf(t *testing.T) {
	vcs := func(version string, kv ...string) *debug.BuildInfo {
		b := &debug.BuildInfo{Main: debug.Module{Path: "postern", Version: version}}
		for i := 0; i+1 < len(kv); i += 2 {
			b.Settings = append(b.Settings, debug.BuildSetting{Key: kv[i], Value: kv[i+1]})
		}
		return b
	}
	const commit = "0123456789abcdef0123456789abcdef01234567"
	for _, tt := range []struct {
		name, stamp string
		build       *debug.BuildInfo
		want        string
	}{
		{"a tag", "v1.2.0", vcs("(devel)", "vcs.revision", commit), "v1.2.0"},
		{"commits since a tag", "v1.2.0-3-g0123456", nil, "v1.2.0-3-g0123456"},
		{"a module", "", vcs("v1.2.0"), "v1.2.0"},
		{"a commit", "", vcs("(devel)", "vcs.revision", commit, "vcs.modified", "false"), "0123456789ab"},
		{"changed files", "", vcs("(devel)", "vcs.revision", commit, "vcs.modified", "true"), "0123456789ab-dirty"},
		{"no version control", "", vcs("(devel)"), "unknown (built without version control)"},
		{"no version control, and no version", "", vcs(""), "unknown (built without version control)"},
		{"nothing known", "", nil, "unknown (built without version control)"},
	} {
		if got := versionOf(tt.stamp, tt.build); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
