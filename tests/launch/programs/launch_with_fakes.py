"""ps-launch with the stand-ins for ps-server and ps-worker; everything else is the real thing."""

from pathlib import Path

from paramserver.launch import plan
from paramserver.launch.main import main

HERE = Path(__file__).parent
plan.PROGRAMS["server"] = (str(HERE / "fake_server.py"),)
plan.PROGRAMS["worker"] = (str(HERE / "fake_worker.py"),)
main()
