package patches

import (
	"runtime/debug"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	const version = "v0.0.0-20260905035102-160fafc42237"
	built := func(replace *debug.Module) *debug.BuildInfo {
		return &debug.BuildInfo{Deps: []*debug.Module{{Path: "example.org/x", Version: "v1.0.0"}, {Path: Module, Version: version, Replace: replace}}}
	}
	for _, tt := range []struct {
		name, want string
		built      *debug.BuildInfo
	}{
		{"with the patches", "", built(&debug.Module{Path: Dir(version)})},
		{"without them", "without the patches", built(nil)},
		{"with other patches", "not from " + Dir(version), built(&debug.Module{Path: "./.cache/gvisor/" + version + "-0123456789abcdef"})},
		{"of another version", "not from " + Dir(version), built(&debug.Module{Path: Dir("v0.0.0-20270101000000-0123456789ab")})},
		{"from somewhere else", "not from " + Dir(version), built(&debug.Module{Path: "../gvisor"})},
		{"without gVisor", "without " + Module, &debug.BuildInfo{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := Check(tt.built)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestDirDependsOnThePatches(t *testing.T) {
	got := Dir("v1.2.3")
	if !strings.HasPrefix(got, "./.cache/gvisor/v1.2.3-") || len(got) != len("./.cache/gvisor/v1.2.3-")+16 {
		t.Errorf("got %q, want the version and 16 digits", got)
	}
	if len(All()) == 0 || got != Dir("v1.2.3") {
		t.Error("want the same directory each time")
	}
}
