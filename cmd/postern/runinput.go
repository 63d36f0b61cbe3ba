package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	slash "path" // path is the type of a flag
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	"postern/internal/contract"
)

// maxInputs is how many inputs a run may have. The server refuses more.
const maxInputs = 100

// A runInput is a file of this machine that a run is given.
type runInput struct {
	root *os.Root // the directory that the file is below
	name string   // relative to root

	path   string // in the sandbox
	size   int64  // bytes
	sha256 string // hexadecimal
}

// open returns the file. A symbolic link out of its directory is not followed.
func (in *runInput) open() (*os.File, error) {
	f, err := in.root.Open(in.name)
	if err != nil {
		return nil, err
	}
	if i, err := f.Stat(); err != nil || !i.Mode().IsRegular() {
		return nil, errors.Join(fmt.Errorf("input %s: is not a regular file", printable(in.name)), err, f.Close())
	}
	return f, nil
}

// measure sets size and digest.
func (in *runInput) measure() error {
	f, err := in.open()
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha256.New()
	if in.size, err = io.Copy(sum, f); err != nil {
		return fmt.Errorf("read input %s: %w", printable(in.name), err)
	}
	in.sha256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// runInputs are the files of one run.
type runInputs struct {
	contract *contract.Contract
	list     []runInput
	notes    []string // what was left out, for the person who asked
	roots    []*os.Root
}

// close closes the directories.
func (ins *runInputs) close() {
	for _, r := range ins.roots {
		_ = r.Close() // it was only read
	}
}

// add adds what a flag --input names: FILE, DIR or either with =PATH, its place in the
// sandbox.
func (ins *runInputs) add(value string) error {
	local, place, named := value, "", false
	if _, err := os.Lstat(value); err != nil { // a file whose name has "=" is what is meant if it is there
		local, place, named = strings.Cut(value, "=")
	}
	if local == "" || named && place == "" {
		return fmt.Errorf("%w: --input: %q: want FILE, DIR, FILE=PATH or DIR=PATH", errUsage, value)
	}
	if place != "" && !slash.IsAbs(place) {
		place = slash.Join(runDir(ins.contract), place)
	}
	info, err := os.Stat(local) // the person named it, so that a link is theirs
	switch {
	case err != nil:
		return fmt.Errorf("--input: %w", err)
	case info.IsDir():
		return ins.addDir(local, place)
	case !info.Mode().IsRegular():
		return fmt.Errorf("--input: %s is neither a file nor a directory", local)
	}
	return ins.addFile(local, place)
}

// addFile adds one file. Without a place, the contract says where it goes.
func (ins *runInputs) addFile(local, place string) error {
	if place == "" {
		var err error
		if place, err = placeOf(ins.contract, filepath.Base(local)); err != nil {
			return err
		}
	}
	if target, err := filepath.EvalSymlinks(local); err == nil {
		local = target
	}
	root, err := ins.root(filepath.Dir(local))
	if err != nil {
		return err
	}
	return ins.append(runInput{root: root, name: filepath.Base(local), path: place})
}

// addDir adds the regular files below a directory. It follows no symbolic links: the
// attack is a checked-out repository with a link to the person's own keys.
func (ins *runInputs) addDir(local, place string) error {
	root, err := ins.root(local)
	if err != nil {
		return err
	}
	return fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			return nil
		case !d.Type().IsRegular():
			ins.notes = append(ins.notes, fmt.Sprintf("left out %s: only regular files are inputs", printable(filepath.Join(local, name))))
			return nil
		}
		at := slash.Join(place, name)
		if place == "" {
			if at, err = placeOf(ins.contract, name); err != nil {
				return err
			}
		}
		return ins.append(runInput{root: root, name: name, path: at})
	})
}

func (ins *runInputs) root(dir string) (*os.Root, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("--input: %w", err)
	}
	ins.roots = append(ins.roots, root)
	return root, nil
}

func (ins *runInputs) append(in runInput) error {
	switch {
	case len(ins.list) == maxInputs:
		return fmt.Errorf("--input: more than %d files: pack them into an archive", maxInputs)
	case !utf8.ValidString(in.path) || strings.ContainsFunc(in.path, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("--input: %s: the name of an input is UTF-8 without control characters", printable(in.path))
	case slices.ContainsFunc(ins.list, func(o runInput) bool { return o.path == in.path }):
		return fmt.Errorf("--input: two files would be at %s: name the place of each with FILE=PATH", in.path)
	}
	if err := in.measure(); err != nil {
		return err
	}
	ins.list = append(ins.list, in)
	return nil
}

// runDir returns the working directory of a run.
func runDir(c *contract.Contract) string {
	switch {
	case c.Files.Dir != "":
		return c.Files.Dir
	case len(c.Files.Write) > 0:
		return c.Files.Write[0]
	}
	return "/"
}

// placeOf returns where a contract has a file of this machine: at the input of its name,
// else where the first pattern of an input takes it, as far up as that does: src/a.py is
// /work/src/a.py of /work/src/**, as a.py is. Name may have directories.
func placeOf(c *contract.Contract, name string) (string, error) {
	place := ""
	for _, in := range c.Files.Inputs {
		dir, _, pattern := strings.Cut(in.Path, "*")
		if !pattern && slash.Base(in.Path) == slash.Base(name) {
			return in.Path, nil
		}
		if !pattern || place != "" {
			continue
		}
		dir = slash.Clean(dir[:strings.LastIndexByte(dir, '/')+1])
		only := &contract.Contract{Files: contract.Files{Inputs: []contract.Input{in}}}
		for i, b := range dir + "/" {
			if at := slash.Join("/", dir[:i], name); b == '/' && place == "" {
				if _, ok := only.MatchInput(at); ok {
					place = at
				}
			}
		}
	}
	if place == "" {
		return "", fmt.Errorf("the contract has no entry for the input %s: add one to files.inputs, or name its place with FILE=PATH", printable(name))
	}
	return place, nil
}
