// Package createostest emulates the CreateOS Sandbox provider, for tests and
// programs that use package createos without an account or a network. It is to
// that provider what [net/http/httptest] is to a web server.
//
//	srv := createostest.NewServer(t)
//	createostest.NoLeaks(t, srv) // at the end of the test
//	driver, err := createos.NewDriver(srv.DriverConfig())
//	env := createos.Environment{CompanyID: "acme", EnvironmentID: "ci", Config: srv.Config()}
//	lease, err := driver.Acquire(ctx, env, createos.AcquireOptions{Workspace: srv.Workspace()})
//	…
//	err = driver.Destroy(ctx, env, lease)
//
// # Two runners
//
// By default commands really run: real bash and real process trees, with the
// files of each sandbox in a temporary directory. Nothing contains them; the
// runner is made for trusted tests, not for foreign code. An absolute path is
// one of this computer, so that the driver's default workspace will not do: ask
// [Server.Workspace] for one, and for another with each sandbox. Commands ignore
// what this program was started to ignore: SIGHUP below nohup, SIGINT in the
// background of a shell without job control.
//
// With [Options.InMemory] or [Options.Commands] commands are answered by a Go
// function and files are kept in memory. With InMemory connections are pipes
// too, so that a whole server works within a testing/synctest bubble and takes
// no real time: start it inside of the bubble that uses it. A driver's shell
// wrapping is understood and taken off, so that the function sees the command
// as it was given, with its arguments, directory, environment and input.
//
// SyncIn and SyncOut of the driver need real processes, those of the default or,
// over pipes, of [Options.RealCommands]: they run scripts that call tar, find and
// other programs, which nothing in memory answers.
//
// # Faults
//
// [Server.Fail] makes a request go wrong, by route and occurrence: refused,
// delayed, hanging, answered with a status before or after its work was done,
// dropped without a reply, cut in mid-body, garbled. [Server.Pause],
// [Server.Kill], [Server.SetState] and [Server.RemoveRow] change sandboxes
// behind the back of whoever believes to own them. [Server.Requests] is what
// was asked and when, [Server.Sandboxes] what there is.
//
// # What is emulated
//
// Accounts and keys; ownership, by which what is foreign is unknown; the state
// machine of sandboxes with its 409s and, on demand, its delays; names that
// are unique among live sandboxes of an account and blocked until destroyed;
// environment keys that show and values that do not; regions; plan, credit and
// box limits; lists, newest first, with terminal rows and pages; patch, resize
// and egress rules; auto-pause; exec, buffered and streaming; files; managed
// processes with journal, connect, wait, input, signals and delete; the request
// limit; catalogue, whoami and probes. Where the provider's behaviour is in
// doubt, [Options] has a switch.
//
// # What is not
//
// Egress rules and the SSH keys of a create are kept and shown but do nothing.
// The clock of a sandbox is that of the test. There is no scheduler, no resource
// limit, no metrics, bandwidth accounts, networks, disks, templates, SSH logins,
// tunnels, shells, ingress, delegated access tokens or self calls of the guest:
// routes of these are answered with 501, and so is a create with disks or
// networks and a fork with a bandwidth quota. A fork copies files, not memory, and only in memory.
// Texts of errors follow the provider where they are known, no further.
package createostest
