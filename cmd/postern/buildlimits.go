package main

import (
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/build"
)

// BuildSettings is what builds of templates may cost.
type BuildSettings struct {
	Builds       int           // at the same time
	BuildTime    time.Duration // of one
	MaxTemplates int           // of a project
	TemplateMB   int64         // mebibytes of all images and layers of a project
}

func (c *BuildSettings) flags(fs *pflag.FlagSet) {
	fs.IntVar(&c.Builds, "builds", 2, "builds of templates at the same time, each in a sandbox of its own beside --max-sandboxes; others wait")
	fs.DurationVar(&c.BuildTime, "build-time", time.Hour, "longest time of one build of a template")
	fs.IntVar(&c.MaxTemplates, "max-templates", 200, "templates of a project")
	fs.Int64Var(&c.TemplateMB, "template-disk", 51200, "mebibytes that the templates of a project may take on the disk, with the layers that its builds left")
}

func (c *BuildSettings) validate(bad func(flag, format string, args ...any)) {
	for _, l := range []struct {
		flag string
		v    int64
	}{{"builds", int64(c.Builds)}, {"build-time", int64(c.BuildTime)}, {"max-templates", int64(c.MaxTemplates)}, {"template-disk", c.TemplateMB}} {
		if l.v <= 0 {
			bad(l.flag, "want more than 0")
		}
	}
}

// buildConfig returns the settings of the templates of projects. A template may ask for
// more than the operator gives to a sandbox by default, up to E2B's usual sizes.
func (c *Config) buildConfig(server string) build.Config {
	return build.Config{
		Server: server, Off: !c.runsSandboxes(), Dir: filepath.Join(c.Data, "templates"), KeepFreeMB: c.KeepFreeMB,
		Builds: c.Builds, BuildTime: c.BuildTime, MaxTemplates: c.MaxTemplates, MaxProjectMB: c.TemplateMB,
		MaxCPUs: max(c.CPUs, 8), MaxMemoryMB: max(c.MemoryMB, 8192), MaxDiskMB: max(c.DiskMB, 20480),
	}
}
