package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Where a configuration file is looked for unless --config names one: in the
// data directory first, then here.
const (
	configName   = "postern.yaml"
	systemConfig = "/etc/postern/" + configName
)

const maxConfig = 1 << 20 // bytes of a configuration file

// An origin says where the value of a setting comes from.
type origin string

const (
	fromFlag     origin = "flag"
	fromVariable origin = "environment"
	fromFile     origin = "file"
	fromDefault  origin = "default"
)

// A configFile is a configuration file that has been read: a YAML mapping from
// the names of settings, which are those of the flags of "postern up" without
// dashes in front, to their values.
type configFile struct {
	name   string
	keys   []string // in their order
	values map[string]configValue
}

// A configValue is what the file has for one setting.
type configValue struct {
	line int
	list []string // one value unless the file has a sequence
	many bool     // it has one
}

// parseConfig reads a configuration file. It checks the form of the file and not
// whether there are such settings.
func parseConfig(name string, text []byte) (*configFile, error) {
	f := &configFile{name: name, values: map[string]configValue{}}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return f, nil // nothing but comments
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s:%d: want one document, not several", name, more.Line)
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return f, nil
	}
	if root.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s:%d: want settings such as \"mail-domain: agents.example\", one a line", name, root.Line)
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			return nil, fmt.Errorf("%s:%d: want the name of a setting", name, key.Line)
		}
		if before, ok := f.values[key.Value]; ok {
			return nil, fmt.Errorf("%s:%d: %s is set in line %d already", name, key.Line, key.Value, before.line)
		}
		v := configValue{line: key.Line, many: value.Kind == yaml.SequenceNode}
		items := []*yaml.Node{value}
		if v.many {
			items = value.Content
		}
		for _, item := range items {
			if item.Kind != yaml.ScalarNode || item.Tag == "!!null" {
				return nil, fmt.Errorf("%s:%d: %s: want a value, or a list of values", name, item.Line, key.Value)
			}
			v.list = append(v.list, item.Value)
		}
		f.keys = append(f.keys, key.Value)
		f.values[key.Value] = v
	}
	return f, nil
}

// unknown returns the error for the first key that is no setting.
func (f *configFile) unknown() error {
	names := settingNames()
	for _, key := range f.keys {
		if key != "config" && slices.Contains(names, key) {
			continue
		}
		like := nearest(key, names)
		if like == "" {
			like = nearest(strings.ReplaceAll(strings.ToLower(key), "_", "-"), names)
		}
		if like != "" {
			return fmt.Errorf("%s:%d: there is no setting %q; did you mean %q?", f.name, f.values[key].line, key, like)
		}
		return fmt.Errorf("%s:%d: there is no setting %q; postern help up lists them", f.name, f.values[key].line, key)
	}
	return nil
}

// set sets a flag to what the file has for it. A path is relative to the file.
func (f *configFile) set(flag *pflag.Flag) error {
	v := f.values[flag.Name]
	if _, ok := flag.Value.(*list); v.many && !ok {
		return fmt.Errorf("%s:%d: %s takes one value, not a list", f.name, v.line, flag.Name)
	}
	for _, value := range v.list {
		if _, ok := flag.Value.(path); ok && value != "" && !filepath.IsAbs(value) {
			value = filepath.Join(filepath.Dir(f.name), value)
		}
		if err := flag.Value.Set(value); err != nil {
			return fmt.Errorf("%s:%d: %s: %w", f.name, v.line, flag.Name, err)
		}
	}
	return nil
}

// openConfig reads the configuration file that is meant: the named one, or else
// that of the data directory, or the system's. It returns nil if there is none.
func openConfig(named, data string) (*configFile, error) {
	if named != "" {
		return readConfig(named)
	}
	for _, name := range []string{filepath.Join(data, configName), systemConfig} {
		f, err := readConfig(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if errors.Is(err, fs.ErrPermission) {
			return nil, nil //nolint:nilnil // who may not read it may not enter the data directory either, and learns so there
		}
		if err != nil {
			return nil, err
		}
		if d, ok := f.values["data"]; ok && name != systemConfig && (len(d.list) != 1 || filepath.Clean(d.list[0]) != filepath.Clean(data)) {
			return nil, fmt.Errorf("%s:%d: data: this file was found in the data directory, and cannot name another", name, d.line)
		}
		return f, nil
	}
	return nil, nil //nolint:nilnil // a server needs no file
}

func readConfig(name string) (*configFile, error) {
	b, err := readBounded(name, maxConfig)
	if err != nil {
		return nil, err
	}
	return parseConfig(name, b)
}

// settle gives each setting among the flags its value: the command line's, or
// the environment's, or the configuration file's, or its default. It returns
// where each is from. A server refuses a file with unknown keys; other commands
// read from it only which server is meant.
func settle(flags *pflag.FlagSet) (map[string]origin, error) {
	from := map[string]origin{}
	known := settings()
	flags.VisitAll(func(f *pflag.Flag) {
		from[f.Name] = fromDefault
		if _, ok := os.LookupEnv(variable(f.Name)); ok && known[variable(f.Name)] {
			from[f.Name] = fromVariable
		}
		if f.Changed {
			from[f.Name] = fromFlag
		}
	})
	if err := fromEnvironment(flags); err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	data := flags.Lookup("data")
	if data == nil {
		return from, nil
	}
	named := ""
	if f := flags.Lookup("config"); f != nil {
		named = f.Value.String()
	}
	file, err := openConfig(named, data.Value.String())
	if err != nil || file == nil {
		return from, err
	}
	server := flags.Lookup("listen") != nil
	if server {
		if err := file.unknown(); err != nil {
			return nil, err
		}
	}
	flags.VisitAll(func(f *pflag.Flag) {
		_, has := file.values[f.Name]
		if !has || from[f.Name] != fromDefault || err != nil || !server && f.Name != "data" && f.Name != "database" && f.Name != "cache" {
			return
		}
		err = file.set(f)
		from[f.Name] = fromFile
	})
	return from, err
}

// settingNames returns the names of all settings.
func settingNames() (names []string) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	new(Config).flags(flags)
	flags.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}
