"""ps-launch with the stand-ins for ps-server and ps-worker; everything else is the real thing."""

from pathlib import Path

from paramserver.launch.main import main
from paramserver.launch.plan import runs

HERE = Path(__file__).parent
runs.PROGRAMS["server"] = (str(HERE / "fake_server.py"),)
runs.PROGRAMS["worker"] = (str(HERE / "fake_worker.py"),)
main()
