package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// A volumeFacts describes a volume, as E2B's wire does, with its size besides.
type volumeFacts struct {
	VolumeID  string    `json:"volumeID"`
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"createdAt"`
	SizeMB    int64     `json:"sizeMB"` // mebibytes that it may hold
	UsedMB    int64     `json:"usedMB"` // mebibytes of the disk that it takes
}

// A volumeFile describes a file in a volume. A sandbox chose its names.
type volumeFile struct {
	Path   string    `json:"path"`
	Type   string    `json:"type"`
	Target string    `json:"target,omitempty"` // of a symbolic link
	Size   int64     `json:"size"`             // bytes
	Mode   uint32    `json:"mode"`
	UID    uint32    `json:"uid"`
	GID    uint32    `json:"gid"`
	MTime  time.Time `json:"mtime"`
}

func volumeCommand() *command {
	var c Config
	var depth int
	return &command{
		use: "volume", short: "make, list, look into and delete volumes", long: `
A volume is a directory of files that outlives sandboxes. Its creator mounts it
at create, into one sandbox or into many at the same time:

  const volume = await Volume.create('data')
  await Sandbox.create({ volumeMounts: { '/mnt/data': volume } })

What one sandbox writes the others see at once. Without any sandbox its files are
read and written with the SDK's Volume, which needs one more variable:

  export E2B_VOLUME_API_URL=http://127.0.0.1:3000

Each volume is a file system of its own, with a limit that nothing inside can get
past: postern up --volume-size. It is kept below the server's data directory, on
this machine alone, and is not part of postern backup. One that a sandbox has
mounted is not deleted.`,
		flags: c.location,
		below: []*command{
			{
				use: "create NAME", short: "make an empty volume", facts: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					name, err := oneArg(args, "NAME")
					if err != nil {
						return err
					}
					var v volumeFacts
					if err := l.call(ctx, "POST", "/volumes", map[string]string{"name": name}, &v); err != nil {
						return err
					}
					return out.facts(v, func() error {
						_, err := fmt.Fprintf(out, "volume  %s (%s), holds %d MiB\n", v.Name, v.VolumeID, v.SizeMB)
						return err
					})
				}),
			},
			{
				use: "list", short: "list the volumes and how full they are", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.volumes(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"NAME", "ID", "ON DISK", "HOLDS", "CREATED"}}
					for _, v := range list {
						rows = append(rows, []string{v.Name, v.VolumeID, fmt.Sprintf("%d MiB", v.UsedMB), fmt.Sprintf("%d MiB", v.SizeMB), ago(v.CreatedAt)})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "ls NAME [PATH]", short: "list the files in a volume", lists: true,
				flags: func(fs *pflag.FlagSet) {
					fs.IntVar(&depth, "depth", 1, "`levels` of directories, at most 10")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if len(args) < 1 || len(args) > 2 {
						return fmt.Errorf("%w: want NAME and perhaps PATH, got %d arguments", errUsage, len(args))
					}
					path := "/"
					if len(args) == 2 {
						path = args[1]
					}
					return l.listVolume(ctx, args[0], path, depth, out)
				}),
			},
			{
				use: "delete NAME", short: "delete a volume and everything in it",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					name, err := oneArg(args, "NAME")
					if err != nil {
						return err
					}
					v, err := l.volume(ctx, name)
					if err != nil {
						return err
					}
					if err := l.call(ctx, "DELETE", "/volumes/"+v.VolumeID, nil, nil); err != nil {
						return err
					}
					_, err = fmt.Fprintln(out, "deleted", v.Name)
					return err
				}),
			},
		},
	}
}

func (l *local) volumes(ctx context.Context) (list []volumeFacts, err error) {
	err = l.call(ctx, "GET", "/volumes", nil, &list)
	return list, err
}

// volume finds a volume by its name or id.
func (l *local) volume(ctx context.Context, name string) (volumeFacts, error) {
	list, err := l.volumes(ctx)
	if err != nil {
		return volumeFacts{}, err
	}
	for _, v := range list {
		if v.Name == name || v.VolumeID == name {
			return v, nil
		}
	}
	return volumeFacts{}, fmt.Errorf("there is no volume %q; postern volume list shows those that there are", name)
}

func (l *local) listVolume(ctx context.Context, name, path string, depth int, out *output) error {
	v, err := l.volume(ctx, name)
	if err != nil {
		return err
	}
	var es []volumeFile
	q := url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}}
	err = l.call(ctx, "GET", "/volumecontent/"+v.VolumeID+"/dir?"+q.Encode(), nil, &es)
	if errors.Is(err, errNotFound) {
		return fmt.Errorf("there is no %q in volume %s", path, v.Name)
	}
	if err != nil {
		return err
	}
	rows := [][]string{{"TYPE", "MODE", "OWNER", "SIZE", "MODIFIED", "PATH"}}
	for _, e := range es {
		// Names come from sandboxes: one may hold what moves a terminal's cursor.
		p := printable(e.Path)
		if e.Target != "" {
			p += " -> " + printable(e.Target)
		}
		rows = append(rows, []string{e.Type, fmt.Sprintf("%04o", e.Mode), fmt.Sprintf("%d:%d", e.UID, e.GID), strconv.FormatInt(e.Size, 10), e.MTime.Local().Format(time.DateTime), p})
	}
	return out.rows(es, rows)
}

// wanted returns how many sandboxes, running or paused, are to have a volume.
func (d *daemon) wanted(ctx context.Context, who auth.Principal, name string) (n int, err error) {
	all, err := d.fleet.List(ctx, who, false)
	for _, s := range all {
		if slices.ContainsFunc(s.Options.Volumes, func(v sandbox.VolumeMount) bool { return v.Name == name }) {
			n++
		}
	}
	return n, err
}
