package run

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/store"
)

// Limits on what a project stores.
const (
	maxContracts = 500  // names
	maxVersions  = 1000 // of one name
)

var contractName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`) })

// mayRead returns an error unless who may read contracts and runs.
func mayRead(who auth.Principal) error {
	if who.Kind == auth.Project || who.Kind == auth.Person || who.Kind == auth.Agent {
		return nil
	}
	return fmt.Errorf("%s may not read contracts and runs: %w", who, auth.ErrForbidden)
}

// mayStore returns an error unless who may store contracts. The attack: an agent
// replaces the contract that people know by a name. Agents send their own contracts
// with the proposal.
func mayStore(who auth.Principal) error {
	if who.Kind == auth.Project || who.Manages() {
		return nil
	}
	return fmt.Errorf("%s may not store contracts, only the project's key and an owner may: %w", who, auth.ErrForbidden)
}

func (s *Service) stored(row func(...any) error) (out Stored, err error) {
	var at int64
	if err := row(&out.Name, &out.Version, &out.Text, &out.Digest, &at, &out.By); err != nil {
		return out, store.NotFound(err)
	}
	out.At = store.FromTime(at)
	if out.Contract, err = contract.Parse([]byte(out.Text)); err != nil {
		// An older version accepted this contract, and this one does not.
		out.Contract = nil
	}
	return out, nil
}

const newest = `c.removed_at = 0 and c.version = (select max(v.version) from contract v where v.project_id = c.project_id and v.name = c.name)`

func (s *Service) contractIn(ctx context.Context, tx *store.Tx, project, name string) (Stored, error) {
	out, err := s.stored(tx.QueryRowContext(ctx, `select c.name, c.version, c.text, c.digest, c.created_at, c.created_by from contract c
		where c.project_id = $1 and c.name = $2 and `+newest, project, name).Scan)
	if err != nil {
		return Stored{}, fmt.Errorf("contract %.80q: %w", name, err)
	}
	return out, nil
}

// PutContract stores a new version of a contract. The name in the text must be name.
// Storing the same text again changes nothing.
func (s *Service) PutContract(ctx context.Context, who auth.Principal, name, text string) (out Stored, err error) {
	if err := mayStore(who); err != nil {
		return out, err
	}
	c, err := contract.Parse([]byte(text))
	if err != nil {
		return out, err
	}
	if c.Name != name || !contractName().MatchString(name) {
		return out, fmt.Errorf("%w: name: the text has %.80q, and the path has %.80q", ErrInvalid, c.Name, name)
	}
	digest := c.Digest()
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		switch out, err = s.contractIn(ctx, tx, who.Project, name); {
		case err == nil && out.Text == text:
			return nil
		case err != nil && !errors.Is(err, store.ErrNotFound):
			return err
		}
		var version, names int64
		if err := tx.One(ctx, `select coalesce(max(version), 0) from contract where project_id = $1 and name = $2`, []any{who.Project, name}, &version); err != nil {
			return err
		}
		if err := tx.One(ctx, `select count(distinct name) from contract where project_id = $1`, []any{who.Project}, &names); err != nil {
			return err
		}
		if version == 0 && names >= maxContracts || version >= maxVersions {
			return fmt.Errorf("%w: a project has at most %d contracts, and %d versions of each; remove a contract, or use another name", ErrFull, maxContracts, maxVersions)
		}
		out = Stored{Name: name, Version: version + 1, Text: text, Digest: digest, At: store.FromTime(store.Time(time.Now())), By: who.String(), Contract: c}
		_, err := tx.ExecContext(ctx, `insert into contract (project_id, name, version, text, digest, created_at, created_by, removed_at) values ($1, $2, $3, $4, $5, $6, $7, 0)`,
			who.Project, name, out.Version, text, digest, store.Time(out.At), out.By)
		if err != nil {
			return fmt.Errorf("store contract: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.ContractPut, name, audit.Fields{"digest": digest, "version": strconv.FormatInt(out.Version, 10)})
	})
	return out, err
}

// Contract returns the newest version of a contract, or [store.ErrNotFound].
func (s *Service) Contract(ctx context.Context, who auth.Principal, name string) (out Stored, err error) {
	if err := mayRead(who); err != nil {
		return out, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = s.contractIn(ctx, tx, who.Project, name)
		return err
	})
	return out, err
}

// Contracts returns the newest versions of all contracts of who's project, by name.
func (s *Service) Contracts(ctx context.Context, who auth.Principal) (out []Stored, err error) {
	if err := mayRead(who); err != nil {
		return nil, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, s.stored, `select c.name, c.version, c.text, c.digest, c.created_at, c.created_by from contract c
			where c.project_id = $1 and `+newest+` order by c.name`, who.Project)
		return err
	})
	return out, err
}

// DeleteContract removes a contract from the list. Its versions stay in the database.
func (s *Service) DeleteContract(ctx context.Context, who auth.Principal, name string) error {
	if err := mayStore(who); err != nil {
		return err
	}
	return s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		was, err := s.contractIn(ctx, tx, who.Project, name)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `update contract set removed_at = $4 where project_id = $1 and name = $2 and version = $3`, who.Project, name, was.Version, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("remove contract: %w", err)
		}
		return audit.Append(ctx, tx, who, audit.ContractDelete, name, audit.Fields{"digest": was.Digest, "version": strconv.FormatInt(was.Version, 10)})
	})
}

// errBoundary means that the boundary in the database is not one that this program
// wrote. Nothing is proposed or started until an owner has set it again.
var errBoundary = fmt.Errorf("the boundary in the database was changed by another program; an owner must set it again: %w", auth.ErrForbidden)

// sealBoundary returns the bytes that the seal of a boundary's version covers.
func sealBoundary(project string, version int64, text string) []byte {
	return []byte(project + "\x00" + strconv.FormatInt(version, 10) + "\x00" + text)
}

// boundaryIn returns the project's boundary as part of tx, or [store.ErrNotFound].
func (s *Service) boundaryIn(ctx context.Context, tx *store.Tx, project string) (Stored, error) {
	var out Stored
	var at int64
	var seal []byte
	err := tx.One(ctx, `select version, text, digest, created_at, created_by, seal from boundary where project_id = $1 order by version desc limit 1`,
		[]any{project}, &out.Version, &out.Text, &out.Digest, &at, &out.By, &seal)
	if err != nil {
		return Stored{}, fmt.Errorf("boundary: %w", err)
	}
	// The attack: somebody who can write the database widens the boundary.
	if !tx.Sealed("boundary of runs", sealBoundary(project, out.Version, out.Text), seal) {
		return Stored{}, errBoundary
	}
	if last, err := tx.Newest(store.Project(project), "boundary "+project, out.Version); err != nil || last > out.Version {
		return Stored{}, errors.Join(errBoundary, err)
	}
	if out.Text == "" {
		return Stored{}, fmt.Errorf("boundary: %w", store.ErrNotFound)
	}
	out.At = store.FromTime(at)
	if out.Contract, err = contract.ParseBoundary([]byte(out.Text)); err != nil {
		return Stored{}, fmt.Errorf("read boundary: %w", err)
	}
	out.Name = out.Contract.Name
	return out, nil
}

// bound returns the boundary of a project, or nil if it has none.
func (s *Service) bound(ctx context.Context, tx *store.Tx, project string) (*Stored, error) {
	b, err := s.boundaryIn(ctx, tx, project)
	if errors.Is(err, store.ErrNotFound) {
		return nil, nil //nolint:nilnil // a project may have none
	}
	if err != nil {
		return nil, err
	}
	return &b, nil
}

// Boundary returns the project's boundary, or [store.ErrNotFound].
func (s *Service) Boundary(ctx context.Context, who auth.Principal) (out Stored, err error) {
	if err := mayRead(who); err != nil {
		return out, err
	}
	err = s.db.View(ctx, func(tx *store.Tx) error {
		out, err = s.boundaryIn(ctx, tx, who.Project)
		return err
	})
	return out, err
}

// maySetBoundary returns an error unless who is an owner. The attack: a key that runs
// jobs extends what jobs may do.
func maySetBoundary(who auth.Principal) error {
	if who.Manages() {
		return nil
	}
	return fmt.Errorf("%s may not change the boundary, only an owner may: %w", who, auth.ErrForbidden)
}

// SetBoundary replaces the project's boundary. Only an owner may. Runs that wait for
// their review are compared with it when they start.
func (s *Service) SetBoundary(ctx context.Context, who auth.Principal, text string) (out Stored, err error) {
	if err := maySetBoundary(who); err != nil {
		return out, err
	}
	c, err := contract.ParseBoundary([]byte(text))
	if err != nil {
		return out, err
	}
	return s.setBoundary(ctx, who, text, c)
}

// RemoveBoundary removes the project's boundary. Only an owner may.
func (s *Service) RemoveBoundary(ctx context.Context, who auth.Principal) error {
	_, err := s.setBoundary(ctx, who, "", nil)
	return err
}

func (s *Service) setBoundary(ctx context.Context, who auth.Principal, text string, c *contract.Contract) (out Stored, err error) {
	if err := maySetBoundary(who); err != nil {
		return out, err
	}
	err = s.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		var version int64
		if err := tx.One(ctx, `select coalesce(max(version), 0) from boundary where project_id = $1`, []any{who.Project}, &version); err != nil {
			return err
		}
		if text == "" {
			if _, err := s.boundaryIn(ctx, tx, who.Project); errors.Is(err, store.ErrNotFound) {
				return err
			}
		}
		out = Stored{Version: version + 1, Text: text, At: store.FromTime(store.Time(time.Now())), By: who.String(), Contract: c}
		verb := audit.BoundaryRemove
		if c != nil {
			verb, out.Name, out.Digest = audit.BoundarySet, c.Name, c.Digest()
		}
		seal, err := tx.MAC("boundary of runs", sealBoundary(who.Project, out.Version, text))
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `insert into boundary (project_id, version, text, digest, created_at, created_by, seal) values ($1, $2, $3, $4, $5, $6, $7)`,
			who.Project, out.Version, text, out.Digest, store.Time(out.At), out.By, seal)
		if err != nil {
			return fmt.Errorf("store boundary: %w", err)
		}
		if _, err := tx.Newest(store.Project(who.Project), "boundary "+who.Project, out.Version); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, verb, who.Project, audit.Fields{"digest": out.Digest, "version": strconv.FormatInt(out.Version, 10)})
	})
	return out, err
}
